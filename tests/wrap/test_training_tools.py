"""Wrapped models in PEFT and in the Trainer of `transformers`."""

import copy
from typing import ClassVar

import pytest
import torch

import jpmhc
from jpmhc.wrap.layers import wrapped_layers
from tests.wrap.models import WITHOUT, difference, disturb, tiny, tokens

transformers = pytest.importorskip("transformers", reason=WITHOUT)


def lora(**options):
    peft = pytest.importorskip("peft", reason="needs peft")
    return peft, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)


def steps(model, count=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(count):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_lora_around_a_wrapped_model(tmp_path):
    peft, config = lora(modules_to_save=["hyper_connections"])
    base = tiny("llama")
    model = peft.get_peft_model(jpmhc.wrap(copy.deepcopy(base)), config)
    before = model(input_ids=tokens()).logits.detach()
    plain = peft.get_peft_model(copy.deepcopy(base), lora()[1])
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "hyper_connections" not in k})
    assert difference(plain(input_ids=tokens()).logits, before) < 1e-5
    steps(model)
    trained = model(input_ids=tokens()).logits.detach()
    assert difference(before, trained) > 1e-3
    parts = next(iter(wrapped_layers(model).values()))
    assert not torch.equal(parts.additions[0].map.bias, parts.original_module.additions[0].map.bias)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(jpmhc.wrap(copy.deepcopy(base)), tmp_path)
    assert difference(trained, again(input_ids=tokens()).logits) < 1e-6


def test_lora_that_freezes_the_connections_is_a_warning():
    peft, config = lora()
    model = peft.get_peft_model(jpmhc.wrap(tiny("llama")), config).train()
    with pytest.warns(UserWarning, match=r"connections of .*layers\.0 are frozen .* modules_to_save=") as warnings:
        steps(model, 2)
    assert sum("are frozen" in str(warning.message) for warning in warnings) == 1


def test_a_frozen_model_and_trained_connections_are_no_warning(recwarn):
    peft, config = lora(modules_to_save=["hyper_connections"])
    steps(peft.get_peft_model(jpmhc.wrap(tiny("llama")), config).train(), 1)
    jpmhc.wrap(tiny("gpt2")).requires_grad_(False).train()(input_ids=tokens())
    assert not [warning for warning in recwarn if "are frozen" in str(warning.message)]


def test_lora_inside_a_model_that_is_wrapped(tmp_path):
    peft, config = lora()
    model = peft.get_peft_model(tiny("llama"), config)
    before = model(input_ids=tokens()).logits.detach()
    with pytest.warns(UserWarning, match="PEFT saves the adapters of this model without its hyper-connections"):
        jpmhc.wrap(model, inputs={"input_ids": tokens()})
    assert difference(before, model(input_ids=tokens()).logits) < 1e-5
    steps(model)
    assert any(held.first_changed() is not None for held in wrapped_layers(model).values())
    trained = model(input_ids=tokens()).logits
    model.merge_and_unload().save_pretrained(tmp_path)
    loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path)
    assert difference(trained, loaded(tokens()).logits) < 1e-4


def test_trainer_trains_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate")
    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 8)]

    def trainer(model, folder, steps):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-2, save_steps=2,
            report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, lr_scheduler_type="constant",
        )  # fmt: skip
        return transformers.Trainer(model, arguments, train_dataset=rows)

    whole = jpmhc.wrap(tiny("gpt2"))
    trainer(whole, tmp_path / "whole", 4).train()
    resumed = jpmhc.wrap(tiny("gpt2"))
    trainer(resumed, tmp_path / "parts", 2).train()
    resumed = disturb(jpmhc.wrap(tiny("gpt2")))
    trainer(resumed, tmp_path / "parts", 4).train(resume_from_checkpoint=True)
    assert next(iter(wrapped_layers(whole).values())).first_changed() is not None
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
    loaded = jpmhc.load_wrapped(transformers.AutoModelForCausalLM, tmp_path / "whole" / "checkpoint-4")
    assert difference(whole.eval()(tokens()).logits, loaded(tokens()).logits) < 1e-5


def test_the_trainer_logs_what_is_watched_at_its_steps(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate")
    from jpmhc.integrations.trainer import WatchCallback

    class Tracker(transformers.TrainerCallback):
        """A tracker as those of `report_to`, which keeps what it is given."""

        seen: ClassVar[list] = []

        def on_log(self, args, state, control, logs, **kwargs):
            if "jpmhc/similarity" in logs:
                self.seen.append((state.global_step, logs["jpmhc/similarity"]))

    rows = [{"input_ids": row, "labels": row} for row in tokens(16, 8)]
    model = disturb(jpmhc.wrap(tiny("gpt2")))
    for steps, resume in ((3, False), (6, True)):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            save_steps=3, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=100,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Tracker()])
        trainer.add_callback(WatchCallback(trainer, every=2))
        trainer.train(resume_from_checkpoint=resume)
        assert not any("watch" in str(hook) for hook in model._forward_hooks.values())
    with pytest.raises(ValueError, match="WatchCallback takes the Trainer, got GPT2LMHeadModel"):
        WatchCallback(model)
    steps, values = zip(*Tracker.seen)
    assert steps == (1, 3, 5)
    assert all(0 < value < 1 for value in values)
