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
    assert len(model.subspace_report.lost) == 1 + 2 * (case.LAYERS - 1)
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
    "Olmo2": r"model.layers.0.post_attention_layernorm: Olmo2RMSNorm\(.*\) takes a share 0.\d+ of a projection's output",
    "Gemma": r"model.embed_tokens: its output is not its weight's rows \(scaled by 5\.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_breaks_exactness(name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        lc.subspace.constrain(case.family(name), case.RANK)


def test_logits_that_are_not_the_heads():
    message = r"lm_head: config.final_logit_softcapping is 30.0: logits are not the head's output"
    with pytest.raises(ValueError, match=message):
        lc.subspace.constrain(case.family("Gemma2"), case.RANK)
    with pytest.raises(ValueError, match=message):
        lc.subspace.cut(case.family("Gemma2"), 0, 2, boundary=case.WHOLE)
    tied = r"got model.embed_tokens.weight of stage 0, which is lm_head.weight of stage 1 too: copy it for one of them"
    with pytest.raises(ValueError, match=tied):
        lc.subspace.cut(case.family("Gemma2", final_logit_softcapping=None), 0, 2, boundary=case.WHOLE)
    free = case.family("Gemma2", final_logit_softcapping=None, tie_word_embeddings=False)
    stages, ids = case.cuts(free, 2, boundary=case.WHOLE), case.ids(96)
    assert case.apart(case.chain(stages, ids), free(input_ids=ids, use_cache=False).logits) < 1e-12


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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", case.FAMILIES)
def test_a_cut_is_the_uncut_model(name, count, attention):
    model = lc.subspace.constrain(case.family(name, attn_implementation=attention), case.RANK)
    stages, ids = case.cuts(model, count), case.ids(96)
    assert case.apart(case.chain(stages, ids), case.logits(model, ids)) < 1e-12
    case.expect_uncut(model, stages, ids)


def test_sliding_windows():
    options = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    model = lc.subspace.constrain(case.family("Qwen2", **options), case.RANK)
    assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    ids = case.ids(96)
    whole = model(input_ids=ids, use_cache=False).logits
    assert case.apart(case.chain(case.cuts(model, 2), ids), whole) < 1e-12
    tokens = lc.subspace.generate(lc.subspace.cut(model, 0, 1), ids, max_new_tokens=20)
    assert torch.equal(tokens, case.by_hand(model, ids, 20))
