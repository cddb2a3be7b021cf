"""README.md of a result: what it is, from what, with which numbers and settings, and how to load it."""

from __future__ import annotations

import io
import json
import os
from typing import Any

from ruamel.yaml import YAML

LOAD = {
    "model": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(FOLDER)""",
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE, dtype="auto"), FOLDER)
tokenizer = AutoTokenizer.from_pretrained(FOLDER)""",
}


def card(manifest: dict[str, Any], metrics: list[dict[str, Any]], *, step: int, kind: str, dtype: str) -> str:
    """The page, with YAML front matter. `kind`: model, adapter or merged; `metrics`: lines of metrics.jsonl."""
    config = manifest["config"]
    name, base = config["run"]["name"], config["model"]["path"]
    origin = f"`{base}`" if base else f"fresh random weights ({config['model']['from_config'].get('model_type')})"
    what = {"model": f"All weights of {origin}, trained", "merged": f"{origin} with a LoRA adapter merged into it",
            "adapter": f"A LoRA adapter for {origin}"}[kind]
    start = f"`{manifest['base']['sha256']}`" if manifest.get("base") else "unknown"
    parts = [
        f"---\n{_front_matter(config, kind)}---", f"# {name}",
        f"{what}, by shardwise {manifest['packages']['shardwise']}, up to step {step:,}; weights in {dtype}.",
        f"```python\n{LOAD['adapter' if kind == 'adapter' else 'model']}\n```",
        "## Data", _data(manifest), "## Numbers", _numbers(metrics, step),
        "## Made by", _made_by(manifest) + f"\n- fingerprint of the weights at the start: {start}",
        "## Settings", f"```json\n{json.dumps(config, indent=1, ensure_ascii=False)}\n```"]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: dict[str, Any], kind: str) -> str:
    base = config["model"]["path"]
    fields: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers",
                              "pipeline_tag": "text-generation",
                              "tags": ["shardwise", config["data"]["task"], *(["lora"] if kind != "model" else [])]}
    if _on_hub(base):  # these two may only be names of the hub
        fields |= {"base_model": base, "base_model_relation": "adapter" if kind == "adapter" else "finetune"}
    hubs = [source["hub"] for source in config["data"]["train"] if _on_hub(source["hub"])]
    if hubs:
        fields["datasets"] = list(dict.fromkeys(hubs))
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(fields, text)
    return text.getvalue()


def _on_hub(name: str | None) -> bool:
    return name is not None and name.count("/") == 1 and ":" not in name and not name.startswith((".", "/", "~")) \
        and not os.path.exists(name)


def _data(manifest: dict[str, Any]) -> str:
    lines = ["| source | rows | fingerprint |", "|---|---|---|"]
    for side in ("train", "eval"):
        for source in manifest["data"].get(f"{side}_sources") or []:
            rows = "streamed" if source["rows"] is None else f"{source['rows']:,}"
            lines.append(f"| {side}: `{source['name']}` | {rows} | `{source['fingerprint'] or '-'}` |")
    counts = manifest["data"]["train"]
    if counts is not None:
        left_out = sum(counts["dropped"].values())
        lines += ["", f"{counts['examples']:,} examples of {counts['rows']:,} rows, {counts['tokens']:,} tokens, "
                      f"{counts['supervised_tokens']:,} of them supervised, {left_out:,} rows left out."]
    return "\n".join(lines)


def _numbers(metrics: list[dict[str, Any]], step: int) -> str:
    steps = [line for line in metrics if "loss" in line and line["step"] <= step]
    scores = [line for line in metrics if "eval_loss" in line and line["step"] <= step]
    lines = [f"- steps: {step:,}"]
    if steps:
        lines += [f"- training loss: {steps[0]['loss']:.4f} at step {steps[0]['step']}, {steps[-1]['loss']:.4f} at "
                  f"step {steps[-1]['step']} (nats per supervised token)",
                  f"- tokens trained on: {sum(line['tokens'] for line in steps):,}, of them supervised "
                  f"{sum(line['supervised_tokens'] for line in steps):,}"]
    if scores:
        lines.append(f"- evaluation loss: {scores[0]['eval_loss']:.4f} at step {scores[0]['step']}, "
                     f"{scores[-1]['eval_loss']:.4f} at step {scores[-1]['step']} (perplexity "
                     f"{scores[-1]['eval_perplexity']:.2f})")
    return "\n".join(lines)


def _made_by(manifest: dict[str, Any]) -> str:
    git, sessions = manifest["git"], manifest.get("sessions", [])
    code = f"commit `{git['sha']}`{' with changes' * git['dirty']}" if git else "an installed package"
    packages = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    lines = [f"- code: {code}; Python {manifest['python']}", f"- packages: {packages}",
             f"- command: `{' '.join(manifest['command'])}`"]
    lines += [f"- {one['started']}: from step {one['from_step']:,}, {one['strategy']} on {one['world_size']} ranks"
              for one in sessions]
    return "\n".join(lines)
