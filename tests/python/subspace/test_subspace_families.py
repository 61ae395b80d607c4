"""lc.subspace on tiny models of the package transformers, built from configs; skipped by name without the package."""

import pytest
import subspace_case as case
import torch

import torch_lowcomm as lc

pytest.importorskip("transformers", reason="no package transformers")


@pytest.mark.parametrize("name", case.FAMILIES)
def test_a_family_is_found(name):
    model = lc.subspace.constrain(case.family(name), case.RANK)
    assert lc.subspace.check(model) == []
    assert model.subspace_parts.family == "transformers"
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert len(model.subspace_report.lost) == 1 + 2 * case.LAYERS
    assert model(input_ids=case.ids(96)).logits.shape == (case.BATCH, case.TIME, 96)


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_tied_head_is_untied(name):
    model = case.family(name, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    lc.subspace.constrain(model, case.RANK)
    model.tie_weights()
    assert model.subspace_report.untied and model.lm_head.weight is not model.model.embed_tokens.weight
    assert lc.subspace.check(model) == []


REFUSED = {
    "Olmo2": r"model.layers.0.post_attention_layernorm: Olmo2RMSNorm, a norm or gain, behind model.layers.0.self_attn.o_proj",
    "Gemma": r"model.embed_tokens: its output is not its weight's rows \(scaled by 5\.",
    "Gemma2": r"model.layers.3.post_feedforward_layernorm: Gemma2RMSNorm, a norm or gain, behind model.layers.3.mlp.down_proj",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_breaks_exactness(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        lc.subspace.constrain(case.family(name), case.RANK)


def test_biases_of_llama():
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn.o_proj.bias: a trained bias leaves the subspace"):
        lc.subspace.constrain(case.family("Llama", attention_bias=True), case.RANK)


def test_gpt2_has_no_linear_maps():
    import transformers

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=96))
    with pytest.raises(ValueError, match=r"expected transformer.h.0.attn.c_proj to be an nn.Linear, got Conv1D"):
        lc.subspace.constrain(model, case.RANK)


def test_a_checkpoint_is_refused(tmp_path):
    case.family("Llama", torch.float32).save_pretrained(tmp_path)
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"got trained weights \(of {tmp_path}\).*project_pretrained=True"):
        lc.subspace.constrain(model, case.RANK)
    assert lc.subspace.check(lc.subspace.constrain(model, case.RANK, project_pretrained=True)) == []
