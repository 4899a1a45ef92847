"""A small random-weight model and its tokenizer, the same on every machine.

No model is downloaded: weights come from a fixed seed, the tokenizer is trained on made-up text.
Random weights give varied greedy text, which is enough to see whether two runs agree, and a prefill
whose cost is real. Made once, kept in ``.cache/`` under a name that holds the recipe's version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .progress import step

REPO = Path(__file__).resolve().parents[2]
RECIPE = 3  # Raise it when what make() writes changes: old copies are then left aside.
VOCAB = 4096
MAX_TOKENS = 16384
SEED = 20240229

ARCHITECTURES = ("llama", "mqa", "thin", "thin-mqa", "mla", "hybrid", "states", "eagle")
WINDOW = 300  # tokens that the hybrid's sliding layers attend to


def model_dir(architecture: str = "llama") -> Path:
    """Where the model of this architecture lies once made."""
    return REPO / ".cache" / "models" / f"{architecture}-v{RECIPE}"


def ensure(architecture: str = "llama") -> Path:
    """Returns the model's directory, making the model first where it is missing.

    Safe to call from several processes: each writes aside and renames, and the first rename wins.
    """
    target = model_dir(architecture)
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        with step(f"making the small {architecture} model (once)"):
            _make(architecture, aside)
        try:
            aside.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _make(architecture: str, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    _tokenizer(out)
    torch.manual_seed(SEED)
    config = _config("thin" if architecture == "eagle" else architecture)
    if architecture == "eagle":
        config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if architecture == "eagle":
        _save_eagle(model, out)
    else:
        model.save_pretrained(out)


def _save_eagle(model: Any, out: Path) -> None:
    """Save a Llama of one layer as an EAGLE head for thin and hybrid, which lends it the rest."""
    import torch
    from safetensors.torch import save_file

    layer = "model.layers.0."
    weights = {
        name.removeprefix("model."): value.contiguous()
        for name, value in model.state_dict().items()
        if name.startswith(layer) and "input_layernorm" not in name
    }
    hidden = model.config.hidden_size
    weights["fc.weight"] = torch.randn(hidden, 2 * hidden) * model.config.initializer_range
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(out)


def _config(architecture: str):
    from transformers import DeepseekV2Config, Gemma3TextConfig, LlamaConfig, Qwen3NextConfig

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if architecture in ("llama", "mqa"):
        return LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4 if architecture == "llama" else 1,
            **common,
        )
    if architecture in ("thin", "thin-mqa"):
        # For tests: as many bytes of keys and values as of llama and mqa, for a fifth of the work.
        # With smaller initial weights, answers would not depend on every page before them.
        return LlamaConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4 if architecture == "thin" else 1,
            head_dim=64,
            **{**common, "initializer_range": 0.12},
        )
    if architecture == "mla":
        return DeepseekV2Config(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            n_routed_experts=2,  # of which none is used: every layer is dense
            n_shared_experts=1,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            first_k_dense_replace=2,
            **common,
        )
    if architecture == "hybrid":
        return Gemma3TextConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            **{**common, "initializer_range": 0.12},
            pad_token_id=0,
        )
    if architecture == "states":  # vLLM's CPU build runs these layers in bfloat16 alone
        return Qwen3NextConfig(
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            linear_num_value_heads=4,
            linear_num_key_heads=4,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
            layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
            **common,
            pad_token_id=0,
        )
    raise ValueError(f"unknown architecture {architecture!r}: one of {', '.join(ARCHITECTURES)}")


def _tokenizer(out: Path) -> None:
    """A BPE tokenizer trained on made-up words, saved the way transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(SEED)
    syllables = [
        c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")
    ]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(6000)]
    lines = [" ".join(rng.choices(words, k=12)) + "." for _ in range(4000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=MAX_TOKENS
    ).save_pretrained(out)


def kv_bytes_per_token(path: Path, value_bytes: int = 4) -> int:
    """The bytes of a token's keys and values in all layers of a Llama."""
    config = json.loads((path / "config.json").read_text())
    heads = config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * heads * size * value_bytes


def prompt(tokens: int, seed: int, shared: list[int] | None = None) -> list[int]:
    """A prompt of this many random token ids: the same for the same seed. It starts with
    ``shared``, if given."""
    rng = random.Random(seed)
    head = list(shared or [])[:tokens]
    return head + [rng.randrange(2, VOCAB) for _ in range(tokens - len(head))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", nargs="?", default="llama", choices=ARCHITECTURES)
    print(ensure(parser.parse_args().architecture))
