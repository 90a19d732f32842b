"""AdamAtan2: Adam with an arctangent instead of a quotient, so that no epsilon is needed."""

from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from jpmhc import checks
from jpmhc.optim.base import GroupwiseOptimizer, ParameterGroup

Form = Literal["trm", "corrected"]


class AdamAtan2(GroupwiseOptimizer):
    r"""Adam with :math:`\operatorname{atan2}(m, \sqrt v)` in place of :math:`m / (\sqrt v + \epsilon)`.

    Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (2024), replace the quotient by an
    arctangent: the update is scale-free, bounded, and without an epsilon. Weight decay is decoupled and comes first:
    :math:`p \leftarrow p (1 - \eta\lambda)` for a parameter :math:`p`, the learning rate :math:`\eta` and
    ``weight_decay`` :math:`\lambda`. Then, with the running means :math:`m` and :math:`v` of the gradient and of its
    square (the moments) and, in step :math:`t`, their bias corrections :math:`c_i = 1 - \beta_i^t`,

    - ``form="trm"``: :math:`p \leftarrow p - (\eta / c_1) \operatorname{atan2}(m, \sqrt v / \sqrt{c_2})`, the form of
      the public Tiny Recursive Model; its first steps are larger, because the correction of the first moment is outside
      the arctangent;
    - ``form="corrected"``: :math:`p \leftarrow p - \eta\, a \operatorname{atan2}(m / c_1, b \sqrt{v / c_2})`, both
      moments corrected inside, with the scales :math:`a` and :math:`b` of Everett et al.

    Args:
        params: Parameters or groups of them.
        lr: Learning rate; a 0-dimensional tensor may be changed in place, also for a captured CUDA graph.
        betas: Decay of the two moments; the public model has (0.9, 0.95).
        weight_decay: Decoupled weight decay.
        form: One of the two forms above: "trm" or "corrected".
        a: Scale of the arctangent; only ``form="corrected"`` has it.
        b: Scale of the arctangent's second argument; only ``form="corrected"`` has it.
        foreach: Use multi-tensor operations; None: only on CUDA, where launching many small kernels is slow.
        capturable: Keep the step counter on the parameters' device, so that a step can be captured in a CUDA graph.

    Note:
        The JPmHC paper credits AdamAtan2 to another work than Everett et al., but means this update.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = AdamAtan2([weight], lr=0.1)
    >>> weight.sum().backward()
    >>> optimizer.step()
    >>> bool((weight < 1).all())
    True
    """

    STATE: ClassVar = ("step", "exp_avg", "exp_avg_sq")
    """Tensors of each parameter's state: a step counter, then tensors of the parameter's shape."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        form: Form = "trm",
        a: float = 1.0,
        b: float = 1.0,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        checks.choice(form, ("trm", "corrected"), "form of AdamAtan2")
        if form == "trm" and (a != 1 or b != 1):
            raise ValueError("the scales a and b belong to form='corrected'; form='trm' has neither")
        defaults = dict(
            lr=lr, betas=betas, weight_decay=weight_decay, form=form, a=a, b=b, foreach=foreach, capturable=capturable
        )
        super().__init__(params, defaults)

    def update_group(self, group: ParameterGroup) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if params:
            self._update(group, params)

    def _update(self, group: ParameterGroup, params: list[Tensor]) -> None:
        grads = []
        for p in params:
            assert p.grad is not None
            if p.grad.is_sparse or torch.is_complex(p):
                raise ValueError("AdamAtan2 takes dense real gradients; use SignSGD for sparse embedding tables")
            grads.append(p.grad)
            if not self.state[p]:
                device = p.device if group["capturable"] else torch.device("cpu")
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
                }
        steps = [self.state[p]["step"] for p in params]
        first = [self.state[p]["exp_avg"] for p in params]
        second = [self.state[p]["exp_avg_sq"] for p in params]
        torch._foreach_add_(steps, 1)
        # Parameters with equal step counts share their bias corrections. Counters on the device must not be read by the
        # host, so with `capturable` each parameter is updated alone, as it is without `foreach`.
        foreach = params[0].is_cuda if group["foreach"] is None else group["foreach"]
        buckets: dict[float, list[int]] = {}
        for i, step in enumerate(steps):
            buckets.setdefault(float(step) if foreach and not group["capturable"] else i, []).append(i)
        for bucket in buckets.values():
            step = steps[bucket[0]]
            chosen = ([tensors[i] for i in bucket] for tensors in (params, grads, first, second))
            _update_together(group, step if group["capturable"] else float(step), *chosen)


def _scales(group: ParameterGroup, step: float | Tensor) -> tuple[float | Tensor, float | Tensor, float | Tensor]:
    """Return three factors: of the first moment, of the root of the second moment, and of the arctangent."""
    beta1, beta2 = group["betas"]
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    if group["form"] == "trm":
        return 1.0, correction2**-0.5, group["lr"] / correction1
    return 1 / correction1, group["b"] * correction2**-0.5, group["lr"] * group["a"]


def _update_together(
    group: ParameterGroup,
    step: float | Tensor,
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
) -> None:
    beta1, beta2 = group["betas"]
    numerator, denominator, size = _scales(group, step)
    torch._foreach_lerp_(first, grads, 1 - beta1)
    torch._foreach_mul_(second, beta2)
    torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(second)
    torch._foreach_mul_(roots, denominator)
    scaled = torch._foreach_mul(first, numerator)
    for m, root in zip(scaled, roots):  # there is no multi-tensor arctangent
        torch.atan2(m, root, out=m)
    torch._foreach_mul_(scaled, size)
    torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_sub_(params, scaled)
