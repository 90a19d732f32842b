"""Saving a wrapped model and loading it again."""

import copy
import json

import pytest
import torch

import jpmhc
from jpmhc.wrap.comparison import default_inputs
from jpmhc.wrap.layers import wrapped_layers
from tests.own import Shrinking, Weighted
from tests.wrap.models import WITHOUT, difference, disturb, tiny

transformers = pytest.importorskip("transformers", reason=WITHOUT)

CLASSES = {
    "gpt2": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "vit": transformers.AutoModelForImageClassification,
}
MIXERS = ("cayley", jpmhc.mixers.Sinkhorn(4, iterations=7))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("mixer", MIXERS, ids=["name", "object"])
def test_what_was_saved_is_loaded(tmp_path, kind, mixer):
    model = disturb(jpmhc.wrap(tiny(kind), mixer=mixer, read="sigmoid"))
    model.save_pretrained(tmp_path)
    loaded = jpmhc.load_wrapped(CLASSES[kind], tmp_path)
    assert type(loaded) is type(model)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    inputs = default_inputs(model)
    assert difference(model(**inputs).logits, loaded(**inputs).logits) < 1e-6
    one, other = (next(iter(wrapped_layers(found).values())) for found in (model, loaded))
    assert one.plan == other.plan
    assert one.additions[0].mixer.extra_repr() == other.additions[0].mixer.extra_repr()


def test_the_plain_class_refuses_it_and_says_how_to_load_it(tmp_path):
    model = jpmhc.wrap(tiny("gpt2"))
    model.save_pretrained(tmp_path)
    for loader in (transformers.AutoModelForCausalLM, transformers.GPT2LMHeadModel):
        with pytest.raises(ValueError, match=r"load this model with jpmhc\.load_wrapped"):
            loader.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load this model with jpmhc\.load_wrapped"):
        transformers.pipeline("text-generation", str(tmp_path))


def test_a_loaded_model_is_saved_loaded_and_unwrapped_like_the_first(tmp_path):
    first = jpmhc.wrap(tiny("gpt2"))
    first.save_pretrained(tmp_path / "one")
    second = jpmhc.load_wrapped(transformers.GPT2LMHeadModel, tmp_path / "one")
    assert not getattr(second, "is_quantized", False)
    second.save_pretrained(tmp_path / "two")
    third = jpmhc.unwrap(jpmhc.load_wrapped(transformers.GPT2LMHeadModel, tmp_path / "two"))
    third.save_pretrained(tmp_path / "three")
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "three")
    inputs = default_inputs(plain)
    assert difference(first(**inputs).logits, plain(**inputs).logits) < 1e-5


def test_coefficients_stay_in_single_precision(tmp_path):
    disturb(jpmhc.wrap(tiny("gpt2"))).save_pretrained(tmp_path)
    loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16)
    inside = {p.dtype for held in wrapped_layers(loaded).values() for p in held.parameters()}
    assert (inside, loaded.lm_head.weight.dtype) == ({torch.float32}, torch.bfloat16)


def test_a_plain_folder_is_refused(tmp_path):
    tiny("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a wrapped model"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    for missing in (tmp_path / "nope", str(tmp_path / "nope")):
        with pytest.raises(ValueError, match=r"^there is no folder .*nope$"):
            jpmhc.load_wrapped(transformers.AutoModelForCausalLM, missing)


BIAS = "transformer.h.0.hyper_connections.additions.1.map.bias"


@pytest.mark.parametrize(
    ("record", "weights", "said"),
    [
        ({}, {BIAS: None}, f"the weights of .* are without {BIAS}"),
        ({}, {BIAS.replace("1", "7"): torch.ones(2)}, "the weights of .* have transformer.h.0.*additions.7.map.bias"),
        ({}, {BIAS: torch.ones(3)}, rf"asks for {BIAS} of the shape \[14\], and the weights have \[3\]"),
        ({"streams": 2}, {}, r"asks for transformer.h.0.*map.bias of the shape \[5\], and the weights have \[14\]"),
        ({"mixer": "sinkhorn"}, {}, r"map.bias of the shape \[24\], and the weights have \[14\]"),
        ({"layers": None}, {}, "does not say how the model was wrapped: 'layers' is missing"),
        ({"options": {"index": 1}}, {}, "no option of wrap is called 'index'"),
    ],
)
def test_weights_and_configuration_that_do_not_fit_are_refused_by_key(tmp_path, record, weights, said):
    safetensors = pytest.importorskip("safetensors.torch")
    jpmhc.wrap(tiny("gpt2")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (note,) = config["fusion_config"].values()
    note |= record
    if record.get("layers", note) is None:
        del note["layers"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = safetensors.load_file(tmp_path / "model.safetensors") | weights
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    safetensors.save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=said):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)


def test_connections_of_another_shape_are_refused_even_where_shapes_may_differ(tmp_path):
    jpmhc.wrap(tiny("gpt2")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (note,) = config["fusion_config"].values()
    note["streams"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"map.bias of the shape \[5\], and the weights have \[14\]"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, ignore_mismatched_sizes=True)


def test_the_loading_report_is_given_and_a_layer_that_is_not_there_is_named(tmp_path):
    jpmhc.wrap(tiny("gpt2")).save_pretrained(tmp_path)
    _, report = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("transformer.h.0", "transformer.h.9"))
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel has no module transformer\.h\.9, which was wrapped: load the"
    ):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)


def test_a_body_and_its_model_load_each_other(tmp_path):
    model = tiny("gpt2")
    disturb(jpmhc.wrap(model.transformer))
    model.save_pretrained(tmp_path / "inside")
    inputs = default_inputs(model)
    again = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, subfolder="inside")
    assert difference(model(**inputs).logits, again(**inputs).logits) < 1e-6
    again.save_pretrained(tmp_path / "whole")
    body = jpmhc.load_wrapped(transformers.AutoModel, tmp_path / "whole")
    assert difference(model.transformer(**inputs)[0], body(**inputs)[0]) < 1e-6


def tiny_llava(layers: int):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "image_size": 4, "patch_size": 2, **small},
        text_config={"model_type": "llama", "vocab_size": 32, **small},
        image_token_index=5,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_a_part_of_a_larger_model_is_loaded_if_the_whole_was_wrapped(tmp_path):
    plain = tiny_llava(1)
    model = copy.deepcopy(plain)
    disturb(jpmhc.wrap(model, layers=model.model.language_model.layers)).save_pretrained(tmp_path / "whole")
    again = jpmhc.load_wrapped(transformers.LlavaForConditionalGeneration, tmp_path / "whole")
    tokens = {"input_ids": torch.arange(6, 12)[None]}
    assert difference(model(**tokens).logits, again(**tokens).logits) < 1e-6
    jpmhc.wrap(plain.model.language_model)
    plain.save_pretrained(tmp_path / "part")
    with pytest.raises(
        ValueError, match="part the part of text_config was wrapped as a model of its own, which cannot"
    ):
        jpmhc.load_wrapped(transformers.LlavaForConditionalGeneration, tmp_path / "part")


def tiny_bart() -> transformers.BartForConditionalGeneration:
    small = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    small |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": 64}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**small)).eval()


def test_a_class_that_takes_any_argument_gets_no_setting(tmp_path):
    """BART's constructor would swallow `num_labels`."""
    jpmhc.wrap(tiny_bart()).save_pretrained(tmp_path)
    loaded = jpmhc.load_wrapped(transformers.BartForSequenceClassification, tmp_path, num_labels=7)
    assert (loaded.classification_head.out_proj.out_features, loaded.config.num_labels) == (7, 7)


@pytest.mark.parametrize("kind", ["t5", "mamba"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_loaded_in_another_type(tmp_path, kind, dtype):
    """T5 bounds its hidden state only in float16, and Mamba adds in float32 only if its weights are narrower."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    plain = transformers.MambaForCausalLM(config).eval() if kind == "mamba" else tiny(kind)
    jpmhc.wrap(copy.deepcopy(plain)).save_pretrained(tmp_path / "wrapped")
    plain.save_pretrained(tmp_path / "plain")
    inputs = default_inputs(plain)
    wanted = type(plain).from_pretrained(tmp_path / "plain", dtype=dtype)(**inputs).logits.float()
    result = jpmhc.load_wrapped(type(plain), tmp_path / "wrapped", dtype=dtype)(**inputs).logits.float()
    assert difference(wanted, result) < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("loader", ["AutoModelForSequenceClassification", "GPT2ForSequenceClassification"])
def test_settings_of_the_configuration_are_taken_as_from_pretrained_takes_them(tmp_path, loader):
    disturb(jpmhc.wrap(tiny("gpt2"))).save_pretrained(tmp_path)
    loader = getattr(transformers, loader)
    names = {0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}
    options = {"use_cache": False, "output_hidden_states": True, "pad_token_id": 0, "dtype": torch.bfloat16}
    model = jpmhc.load_wrapped(loader, tmp_path, id2label=names, num_labels=5, **options)
    assert (model.score.out_features, model.config.id2label, model.config.use_cache) == (5, names, False)
    assert (model.config.output_hidden_states, model.score.weight.dtype) == (True, torch.bfloat16)
    assert float(model.score.weight.detach().float().std()) > 0.01  # a fresh head
    with pytest.raises(TypeError, match="no_such_setting"):
        jpmhc.load_wrapped(loader, tmp_path, no_such_setting=1)


def test_a_head_of_another_size_is_made_anew_where_shapes_may_differ(tmp_path):
    model = disturb(jpmhc.wrap(tiny("vit")))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"asks for classifier\.\w+ of the shape \[5.*, and the weights have \[3"):
        jpmhc.load_wrapped(type(model), tmp_path, num_labels=5)
    with pytest.warns(match=r"classifier\.weight \(saved \[3, 16\], now \[5, 16\]\)"):
        loaded = jpmhc.load_wrapped(type(model), tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert tuple(loaded.classifier.weight.shape) == (5, 16)
    assert 0 < float(loaded.classifier.weight.detach().abs().max()) < 1
    inputs = default_inputs(model)
    assert difference(model.vit(**inputs)[0], loaded.vit(**inputs)[0]) < 1e-6
    with pytest.raises(ValueError, match=r"configuration in config= has no hyper-connections: .* saved with"):
        jpmhc.load_wrapped(type(model), tmp_path, config=tiny("vit").config)


class OwnConfig(transformers.GPT2Config):
    model_type = "nobody-knows-it"


class OwnModel(transformers.GPT2LMHeadModel):
    config_class = OwnConfig


def test_a_class_that_auto_config_does_not_know(tmp_path):
    model = disturb(jpmhc.wrap(OwnModel(OwnConfig(**tiny("gpt2").config.to_diff_dict() | {"n_layer": 2}))))
    model.save_pretrained(tmp_path)
    inputs = default_inputs(model)
    assert difference(model.eval()(**inputs).logits, jpmhc.load_wrapped(OwnModel, tmp_path)(**inputs).logits) < 1e-6


def test_a_configuration_that_models_share_is_left_to_the_others(tmp_path):
    config = tiny("llama").config
    wrapped, plain = (transformers.LlamaForCausalLM(config) for _ in range(2))
    jpmhc.wrap(wrapped)
    assert all(layer.self_attn.config is wrapped.config for layer in wrapped.model.layers)
    plain.save_pretrained(tmp_path)
    transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not a wrapped model"):
        jpmhc.load_wrapped(transformers.LlamaForCausalLM, tmp_path)


def test_a_model_without_head_that_shares_its_configuration_is_told_the_way_out(tmp_path):
    """A body keeps its configuration, with which a larger model around it is saved, so other bodies get the record."""
    config = tiny("llama").config
    wrapped, plain = (transformers.LlamaModel(config) for _ in range(2))
    jpmhc.wrap(wrapped)
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"shared its configuration with a wrapped one is loaded by from_pretrained"):
        jpmhc.load_wrapped(transformers.LlamaModel, tmp_path)
    again = transformers.LlamaModel.from_pretrained(tmp_path, config=tiny("llama").config)
    assert torch.equal(again.layers[0].mlp.up_proj.weight, plain.layers[0].mlp.up_proj.weight)


def test_parts_that_were_saved_alone_are_loaded(tmp_path):
    models = {"bart": tiny_bart(), "t5": tiny("t5")}
    tokens = {"input_ids": torch.arange(3, 11)[None]}
    for name, model in models.items():
        part = disturb(jpmhc.wrap(model)).get_encoder()
        part.save_pretrained(tmp_path / name)
        loader = type(part) if name == "bart" else transformers.T5EncoderModel
        if name == "t5":
            model.save_pretrained(tmp_path / name)
        loaded = jpmhc.load_wrapped(loader, tmp_path / name)
        assert difference(part(**tokens)[0], loaded(**tokens)[0]) < 1e-6


def test_the_language_model_of_a_larger_model_is_saved_alone(tmp_path):
    model = tiny_llava(2)
    part = model.model.language_model
    disturb(jpmhc.wrap(model, layers=part.layers))
    part.save_pretrained(tmp_path)
    loaded = jpmhc.load_wrapped(transformers.AutoModel, tmp_path)
    tokens = {"input_ids": torch.arange(6, 12)[None]}
    assert difference(part(**tokens)[0], loaded(**tokens)[0]) < 1e-6


def test_a_mixer_of_ones_own_is_said_when_wrapping_and_given_when_loading(tmp_path):
    with pytest.warns(UserWarning, match=r"cannot describe the mixer Shrinking: load .* mixer=Shrinking\("):
        model = jpmhc.wrap(tiny("gpt2"), mixer=Shrinking(4))
    disturb(model).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"wrapped with the mixer Shrinking, which a configuration .*mixer=Shrinking\(…\)$"
    ):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)
    with pytest.raises(ValueError, match=r"mixer=Shrinking\(…\), not Sinkhorn"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, mixer=jpmhc.mixers.Sinkhorn(4))
    with pytest.raises(ValueError, match=r"wrapped with Shrinking\(begin=-6.0\), not begin=-3.0"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, mixer=Shrinking(4, begin=-3.0))
    loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, mixer=Shrinking(4))
    inputs = default_inputs(model)
    assert difference(model(**inputs).logits, loaded(**inputs).logits) < 1e-6
    jpmhc.wrap(tiny("gpt2")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mixer= is for a mixer of your own"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, mixer=Shrinking(4))


@pytest.mark.parametrize("kind", [Weighted, jpmhc.mixers.Permutation])
def test_a_mixer_with_tensors_of_its_own_is_loaded_with_them(tmp_path, kind):
    with pytest.warns(UserWarning, match=f"cannot describe the mixer {kind.__name__}"):
        model = disturb(jpmhc.wrap(tiny("gpt2"), mixer=kind(4)))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"with the mixer {kind.__name__}, which a configuration cannot describe"):
        jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)
    loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path, mixer=kind(4))
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    inputs = default_inputs(model)
    assert difference(model(**inputs).logits, loaded(**inputs).logits) < 1e-6
