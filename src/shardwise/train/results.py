"""What a run hands back, and what it keeps from its start so that it can: final/, skeleton/, the base's mark."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from shardwise import demo, dist
from shardwise.checkpoint import layout
from shardwise.config.resolve import Resolved
from shardwise.dist import Ranks
from shardwise.errors import CheckpointError
from shardwise.export import card, skeleton
from shardwise.export.base import fingerprint
from shardwise.export.live import check_logits, gathered_state
from shardwise.export.runs import MANIFEST, SKELETON, read_manifest, read_metrics
from shardwise.export.write import DTYPES, published, wanted_weights, write_check, write_model
from shardwise.model.load import fresh_folder
from shardwise.train.inputs import Inputs
from shardwise.train.parts import Parts
from shardwise.train.provenance import record_end

log = logging.getLogger("shardwise")
CHECK_TOKENS = 32


def keep_skeleton(resolved: Resolved, module: Any, inputs: Inputs, *, anew: bool) -> None:
    """Write RUN/skeleton on rank 0; a resumed run keeps the one it has."""
    folder = Path(resolved.config.run.output_dir or "") / SKELETON
    if anew or not folder.is_dir():
        template = resolved.config.data.chat_template
        skeleton.save(folder, module, inputs.tokenizer, check_ids=inputs.sample[:CHECK_TOKENS],
                      chat_template=Path(template).read_text(encoding="utf-8") if template else None)


def same_base(resolved: Resolved, ranks: Ranks, *, resumed: bool) -> dict[str, Any]:
    """The mark of the weights the run starts from: `path` and fingerprint (export/base.py).

    Raises CheckpointError on every rank when a resumed adapter would go on with other ones.
    """
    config = resolved.config
    name = demo.resolve(config.model.path) if config.model.path else fresh_folder(resolved).name
    folder = Path(config.run.output_dir or "")
    found: dict[str, Any] = {}
    if ranks.main:
        try:
            found = {"path": name, **fingerprint(name if config.model.path else str(folder / name))}
        except OSError as error:
            found = {"path": name, "problem": str(error)}
    found = dist.told_by_main(found)
    if "problem" in found:
        raise CheckpointError(f"the weights of {name} cannot be read: {found['problem']}")
    if resumed and config.adapter.kind != "none" and (folder / MANIFEST).is_file():
        before = read_manifest(folder).get("base")
        if before and before["sha256"] != found["sha256"]:
            raise CheckpointError(f"the base model {name} has other weights ({found['sha256'][:12]}...) than when the "
                                  f"run started ({before['sha256'][:12]}...), and its adapter is right on those only; "
                                  "put them back, or choose another run.output_dir")
    return found


def take_best(parts: Parts) -> int:
    """Put the weights of the kept checkpoint with the lowest evaluation loss in place of the last ones; its step."""
    folder = dist.told_by_main(next(iter(layout.best(parts.folder / "checkpoints"))))
    meta = parts.saver.load(folder, seed=parts.resolved.config.run.seed)
    if parts.ranks.main:
        log.info("the weights are those of %s, eval_loss %.4f", folder, meta["eval_loss"])
    return int(meta["step"])


def export(parts: Parts, final: Path, *, step: int) -> None:
    """Write `final/` from rank 0, with the weights of `step`; every rank takes part in gathering."""
    deepspeed, config = parts.resolved.deepspeed, parts.resolved.config
    engine: Any = parts.engine if deepspeed is None else parts.engine.model
    ids = parts.inputs.sample[:CHECK_TOKENS]
    logits = check_logits(parts.engine.model, ids, parts.device)
    state = gathered_state(engine, zero_stage=0 if deepspeed is None else deepspeed["zero_optimization"]["stage"])
    if state is not None and parts.ranks.main:
        module = parts.engine.module
        wanted = wanted_weights(module)
        dtype = next(name for name, kind in DTYPES.items() if kind == state[next(iter(wanted))].dtype)
        kind = "model" if config.adapter.kind == "none" else "adapter"
        facts = read_manifest(parts.folder)
        page = card.card(facts, read_metrics(parts.folder / "metrics.jsonl"), step=step, kind=kind, dtype=dtype)
        with published(final) as part:
            write_model(part, module, state, frame=parts.folder / SKELETON, wanted=wanted, card=page,
                        record={"run": str(parts.folder.absolute()), "step": step, "kind": kind, "merged": False,
                                "base": facts.get("base")})
            write_check(part, ids, logits, of="live")
        record_end(parts.folder, step)
    dist.barrier()
