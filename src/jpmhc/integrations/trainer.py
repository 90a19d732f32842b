"""A callback that watches hyper-connections while the `Trainer` of transformers trains them."""

from contextlib import ExitStack
from typing import Any

from transformers import Trainer, TrainerCallback

from jpmhc.diagnose import watch


class WatchCallback(TrainerCallback):
    """Log the numbers of `jpmhc.diagnose.watch` through a trainer, at its `global_step` and from its first process.

    The trainer hands the numbers to all trackers of its `report_to`, such as TensorBoard or wandb, under names that
    begin with "jpmhc/", and keeps the numbers in `trainer.state.log_history`. A resumed run continues the count of
    steps.

    Args:
        trainer: The trainer that logs.
        every: The number of steps between watched steps.

    Example:
        >>> import contextlib, jpmhc, tempfile, torch, transformers
        >>> from jpmhc.integrations.trainer import WatchCallback
        >>> config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
        >>> model = jpmhc.wrap(transformers.GPT2LMHeadModel(config))
        >>> rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        >>> with contextlib.redirect_stdout(None):  # the trainer prints every dict that it logs
        ...     arguments = transformers.TrainingArguments(
        ...         tempfile.mkdtemp(), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
        ...     )
        ...     trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        ...     trainer.add_callback(WatchCallback(trainer, every=2))
        ...     output = trainer.train()
        >>> trainer.state.log_history[0]["step"], round(trainer.state.log_history[0]["jpmhc/similarity"], 2)
        (1, 1.0)
    """

    def __init__(self, trainer: Trainer, every: int = 100) -> None:
        if not isinstance(trainer, Trainer):
            raise ValueError(f"WatchCallback takes the Trainer, got {type(trainer).__name__}: add it by add_callback")
        self.trainer, self.every = trainer, every
        self.watching = ExitStack()
        self.numbers: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_end(args, state, control)  # an interrupted training may have left hooks
        self.watching.enter_context(watch(kwargs["model"], self.every, self._keep, start=state.global_step))

    def _keep(self, step: int, numbers: dict[str, float]) -> None:
        self.numbers = {f"jpmhc/{name}": value for name, value in numbers.items()}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.numbers:
            numbers, self.numbers = self.numbers, {}
            self.trainer.log(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watching.close()
