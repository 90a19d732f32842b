"""The Grassmann optimiser against geoopt's retraction, a hand-written momentum recursion, and the geometry itself."""

import copy

import pytest
import torch
from torch import nn

from jpmhc.optim import AdamAtan2, GrassmannianOptimizer, grassmann_frames


class Framed(nn.Module):
    """Two frames of one shape, one of another, and an ordinary weight."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.ModuleList(nn.Module() for _ in range(3))
        for module, shape in zip(self.inner, ((4, 2), (4, 2), (6, 1))):
            start = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))[0]
            module.frame = nn.Parameter(start)
            module.grassmann_frames = ("frame",)
        self.weight = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))

    @property
    def frames(self):
        return [module.frame for module in self.inner]


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_first_step_is_the_canonical_retraction_of_the_horizontal_gradient():
    """Without momentum one exact step is geoopt's Cayley retraction along minus the horizontal gradient."""
    import geoopt  # here: the file's other tests run without it

    model = Framed()
    set_gradients(model, 1)
    expected = []
    for frame in model.frames:
        u, g = frame.detach(), frame.grad
        horizontal = g - u @ (u.T @ g)
        expected.append(geoopt.CanonicalStiefel().retr(u, -0.3 * horizontal))
    GrassmannianOptimizer(model, lr=0.3, betas=(0.0, 0.0), iterations=None).step()
    for frame, target in zip(model.frames, expected):
        # QR keeps an orthonormal frame up to the signs that make R positive, here +1.
        torch.testing.assert_close(frame.detach(), target, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adaptive", [False, True])
def test_momentum_follows_the_algorithm(adaptive):
    lr, beta1, beta2, eps = 0.05, 0.9, 0.999, 1e-8
    model = Framed()
    optimiser = GrassmannianOptimizer(model, lr=lr, adaptive=adaptive, iterations=None)
    u = model.frames[0].detach().clone()
    m, v = torch.zeros_like(u), torch.zeros_like(u)
    for t in range(1, 8):
        set_gradients(model, t)
        g = model.frames[0].grad
        horizontal = (torch.eye(4, dtype=u.dtype) - u @ u.T) @ g
        m = beta1 * m + (1 - beta1) * horizontal
        v = beta2 * v + (1 - beta2) * horizontal**2
        scaled = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) if adaptive else m
        skew = -(scaled @ u.T - u @ scaled.T)
        eye = torch.eye(4, dtype=u.dtype)
        u = torch.linalg.solve(eye - lr / 2 * skew, (eye + lr / 2 * skew) @ u)
        optimiser.step()
        torch.testing.assert_close(model.frames[0].detach(), u, rtol=1e-5, atol=1e-6)


def test_it_descends_and_stays_on_the_manifold():
    """The largest eigenspace of a matrix is found by minimising −tr(UᵀAU)."""
    torch.manual_seed(0)
    model = Framed()
    basis = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    a = basis @ torch.diag(torch.tensor([5.0, 4.0, 1.0, 0.5], dtype=torch.float64)) @ basis.T
    optimiser = GrassmannianOptimizer(model, lr=0.1, iterations=2)
    frame = model.frames[0]
    for _ in range(200):
        optimiser.zero_grad()
        (-(frame.T @ a @ frame).trace()).backward()
        optimiser.step()
        assert (frame.T @ frame - torch.eye(2)).abs().max() < 1e-14
    assert (frame.T @ a @ frame).trace().item() == pytest.approx(9.0, abs=1e-8)
    top = basis[:, :2] @ basis[:, :2].T
    torch.testing.assert_close((frame @ frame.T).detach(), top, atol=1e-4, rtol=0)


def test_frames_leave_the_inner_optimiser_and_the_rest_is_stepped_by_it():
    model, plain = Framed(), Framed()
    inner = AdamAtan2(model.parameters(), lr=0.1)
    optimiser = GrassmannianOptimizer(model, inner)
    assert [p is model.weight for group in inner.param_groups for p in group["params"]] == [True]
    alone = AdamAtan2([plain.weight], lr=0.1)
    for t in range(3):
        set_gradients(model, t)
        set_gradients(plain, t)
        optimiser.step()
        alone.step()
    assert torch.equal(model.weight, plain.weight)


def test_frames_are_found_through_wrappers_and_as_buffers():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = Framed()
    assert len(grassmann_frames(Wrapper(Wrapper(model)))) == 3
    module = model.inner[2]
    frame = module.frame
    del module.frame
    module.register_buffer("frame", frame)
    assert grassmann_frames(model)["inner.2.frame"] is frame
    with pytest.raises(ValueError, match="no Grassmann frame"):
        GrassmannianOptimizer(nn.Linear(2, 2))


def test_state_survives_saving():
    model = Framed()
    optimiser = GrassmannianOptimizer(model, AdamAtan2(model.parameters(), lr=0.01), adaptive=True)
    for t in range(3):
        set_gradients(model, t)
        optimiser.step()
    other = copy.deepcopy(model)
    resumed = GrassmannianOptimizer(other, AdamAtan2(other.parameters(), lr=0.5), lr=0.7)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for t in range(3, 6):
        for these, that in ((model, optimiser), (other, resumed)):
            set_gradients(these, t)
            that.step()
    for p, q in zip(model.parameters(), other.parameters()):
        assert torch.equal(p, q)
