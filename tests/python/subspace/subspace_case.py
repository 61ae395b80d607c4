"""Small decoders and batches, for the tests of lc.subspace."""

import torch
from model import GPT, VOCABULARY, Config

import torch_lowcomm as lc

WIDTH, RANK, LAYERS, BATCH, TIME = 32, 8, 4, 3, 10
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Olmo")


def gpt(dtype=torch.float64, layers=LAYERS, seed=0):
    torch.manual_seed(seed)
    return GPT(Config(width=WIDTH, layers=layers, heads=4, context=48)).to(dtype)


def constrained(dtype=torch.float64, **options):
    return lc.subspace.constrain(gpt(dtype), RANK, **options)


def family(name, dtype=torch.float64, **options):
    """A tiny model of `transformers`, built from a config."""
    import transformers

    sizes = {
        "vocab_size": 96,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(sizes | options))
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def ids(vocabulary=VOCABULARY, batch=BATCH, time=TIME, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (batch, time), generator=generator)
