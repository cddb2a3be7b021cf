"""`shardwise export`: a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import argparse
import os

from shardwise.errors import EXIT_OK, EXIT_USER, UserError

ABOUT = """Make a Hugging Face folder of a run's checkpoint: consolidated safetensors, tokenizer, card.
Needs no GPU, whatever strategy and however many ranks the run had."""


def export(words: list[str]) -> int:
    """`shardwise export`: write one folder and say where."""
    parser = argparse.ArgumentParser(prog="shardwise export", description=ABOUT, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="the folder of a run (its run.output_dir)")
    parser.add_argument("--checkpoint", metavar="N|PATH", help="step or folder; the newest complete one when not set")
    parser.add_argument("--merge-lora", action="store_true", help="add the adapter into the base model's weights")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights; as in final/ when not set")
    parser.add_argument("--output", metavar="FOLDER", help="RUN/exports/step-N-KIND-DTYPE when not set")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    if not words:
        parser.print_usage()
        return EXIT_USER
    asked = parser.parse_args(words)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # weights only pass through
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from shardwise.export.runs import open_run

    run = open_run(asked.run)
    from shardwise.export import offline

    try:
        folder, said = offline.export(run, offline.Wish(
            checkpoint=asked.checkpoint, merge_lora=asked.merge_lora, dtype=asked.dtype, output=asked.output,
            overwrite=asked.overwrite))
    except OSError as error:
        raise UserError(f"the export could not be written: {error}") from None
    for line in said:
        print(line)
    print(f"the model is in {folder}")
    return EXIT_OK
