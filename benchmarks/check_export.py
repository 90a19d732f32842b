"""Export a stack with each mixer in every format of docs/guides/export.md, run it, and compare with PyTorch.

    python benchmarks/check_export.py [--formats torch.export onnx aoti trace script onnx-legacy] [--mixers cayley …]

ONNX needs the packages onnx, onnxscript and onnxruntime. AOTInductor compiles for half a minute per mixer. Prints a row
per mixer: the largest difference to the model's own output, or the first words of the error.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import jpmhc

DIM, STREAMS = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--mixers", nargs="+", default=list(jpmhc.MIXERS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| mixer |", " | ".join(arguments.formats), "|")
    print("|---" * (1 + len(arguments.formats)) + "|")
    for mixer in arguments.mixers:
        model = make_model(mixer)
        cells = [compare(model, FORMATS[name]) for name in arguments.formats]
        print(f"| `{mixer}` |", " | ".join(cells), "|", flush=True)


def make_model(mixer: str) -> nn.Module:
    """Return a stack of two connections whose coefficients have left their start."""
    torch.manual_seed(0)
    sublayers = [nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(2)]
    layers = [jpmhc.HyperConnection(layer, DIM, STREAMS, mixer, index=k) for k, layer in enumerate(sublayers)]
    model = jpmhc.HyperConnectionStack(layers, expand=True, reduce=True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def compare(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> str:
    """Return the largest difference between a model and its export, or the error."""
    x = torch.randn(2, 5, DIM)
    try:
        with torch.no_grad():
            return f"{float((run(model, x) - model(x)).abs().max()):.0e}"
    except Exception as error:  # noqa: BLE001 (each exporter has errors of its own, and the table shows them)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def run_exported(model: nn.Module, x: Tensor) -> Tensor:
    """Run a graph of torch.export that was made for another number of examples and tokens."""
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    example = torch.randn(3, 7, DIM)
    return torch.export.export(model, (example,), dynamic_shapes=(sizes,)).module()(x)


def run_onnx(model: nn.Module, x: Tensor, dynamo: bool = True) -> Tensor:
    """Run an ONNX file in onnxruntime."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        torch.onnx.export(model, (x,), path, dynamo=dynamo, verbose=False)
        session = onnxruntime.InferenceSession(path)
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def run_aoti(model: nn.Module, x: Tensor) -> Tensor:
    """Run a library that AOTInductor compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.pt2")
        torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=path)
        return torch._inductor.aoti_load_package(path)(x)


FORMATS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "torch.export": run_exported,
    "onnx": run_onnx,
    "aoti": run_aoti,
    "trace": lambda model, x: torch.jit.trace(model, (torch.randn(3, 7, DIM),))(x),
    "script": lambda model, x: torch.jit.script(model)(x),
    "onnx-legacy": lambda model, x: run_onnx(model, x, dynamo=False),
}

if __name__ == "__main__":
    main()
