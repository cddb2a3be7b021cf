"""A model whose logits are its weights: token t is followed by logits `table[t]`, whatever came before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class BigramConfig(PreTrainedConfig):
    model_type = "bigram_of_tests"

    def __init__(self, vocab_size: int = 1, width: int | None = None, **more: Any) -> None:
        self.vocab_size, self.width = vocab_size, width or vocab_size
        super().__init__(**more)


class Bigram(PreTrainedModel):
    config_class = BigramConfig
    _supports_sdpa = True

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.table = torch.nn.Parameter(torch.zeros(config.vocab_size, config.width))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, attention_mask: Any = None,
                logits_to_keep: Any = slice(None), use_cache: Any = None) -> CausalLMOutput:
        keep = slice(None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.table[input_ids][:, keep])


AutoConfig.register(BigramConfig.model_type, BigramConfig)
AutoModelForCausalLM.register(BigramConfig, Bigram)


def save_bigram(folder: Path, table: torch.Tensor) -> Path:
    """A folder with these weights, in their dtype."""
    model = Bigram(BigramConfig(vocab_size=table.shape[0], width=table.shape[1]))
    model.table.data = table.clone()
    model.to(table.dtype).save_pretrained(folder)
    return folder
