"""What a fused hyper-connection computes: one hashable record that selects and specialises the kernels."""

import ast
import dataclasses
import functools
import math

from jpmhc import checks

NORMS = ("layer", "rms")
READS = WRITES = ("softmax_matrix", "softmax", "sigmoid")
MIXERS = ("identity", "unconstrained", "sinkhorn", "cayley", "grassmann", "permutation", "kronecker")
MAX_DIM = 8192  # the write kernels keep one stream's row in the registers of one program


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape and the constraints of one connection. Everything the kernels are compiled for is in here.

    Args:
        n: Streams: 2, 4 or 8.
        d: Width of a stream, a multiple of 8, at most 8192.
        norm: Weightless norm before the projection, `"layer"` or `"rms"`, over all n·d numbers of a token.
        eps: Added to the variance (or mean square) inside the norm.
        read: How the read logits become n weights: `"softmax_matrix"` (n² logits), `"softmax"` or `"sigmoid"` (n).
        write: The same for the write weights.
        temperature: Divides the read and write logits.
        mixer: One of `MIXERS`.
        scale: Cayley: A = scale · (M - Mᵀ).
        iterations: Sinkhorn: row-then-column normalisations. Cayley: `None` is exact, an integer the paper's iteration.
        rank: Grassmann: columns of the frame.
        permutations: Permutation: each basis element as the tuple (σ(0), …, σ(n-1)), with P[σ(j), j] = 1.
        post_norm: A weightless RMS norm of every stream after the write, with the same eps.
    """

    n: int
    d: int
    norm: str = "layer"
    eps: float = 1e-6
    read: str = "softmax"
    write: str = "softmax"
    temperature: float = 1.0
    mixer: str = "cayley"
    scale: float = 0.1
    iterations: int | None = None
    rank: int = 0
    permutations: tuple[tuple[int, ...], ...] = ()
    post_norm: bool = False
    key: str = dataclasses.field(init=False, repr=False, compare=False)
    """The record as text, the form in which it passes through `torch.library`; `decode` reads it."""

    def __post_init__(self) -> None:
        for value, name, choices in (
            (self.n, "n", (2, 4, 8)),
            (self.norm, "norm", NORMS),
            (self.read, "read", READS),
            (self.write, "write", WRITES),
            (self.mixer, "mixer", MIXERS),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        if self.d % 8 or not 8 <= self.d <= MAX_DIM:
            raise ValueError(f"d must be a multiple of 8 between 8 and {MAX_DIM}, got {self.d}")
        checks.positive(self.temperature, "temperature")
        checks.positive(self.eps, "eps")
        checks.number(self.scale, "scale")
        checks.at_least_one(self.iterations, "iterations")
        if self.mixer == "sinkhorn" and self.iterations is None:
            raise ValueError("the sinkhorn mixer needs a number of iterations")
        if self.mixer == "grassmann" and not 1 <= self.rank <= self.n:
            raise ValueError(f"the grassmann mixer needs a rank between 1 and n = {self.n}, got {self.rank}")
        if self.mixer == "permutation" and not self.permutations:
            raise ValueError("the permutation mixer needs at least one permutation")
        if any(sorted(p) != list(range(self.n)) for p in self.permutations):
            raise ValueError(f"every permutation must rearrange 0..{self.n - 1}, got {self.permutations}")
        for name in ("eps", "temperature", "scale"):
            object.__setattr__(self, name, float(getattr(self, name)))
        object.__setattr__(self, "permutations", tuple(tuple(p) for p in self.permutations))
        # Made once, as torch.compile cannot make text of numbers that it takes for variable.
        values = tuple(getattr(self, field.name) for field in dataclasses.fields(self) if field.init)
        object.__setattr__(self, "key", repr(values))

    @property
    def read_logits(self) -> int:
        return self.n**2 if self.read == "softmax_matrix" else self.n

    @property
    def write_logits(self) -> int:
        return self.n**2 if self.write == "softmax_matrix" else self.n

    @property
    def mixer_logits(self) -> int:
        n = self.n
        return {
            "identity": 0,
            "unconstrained": n * n,
            "sinkhorn": n * n,
            "cayley": n * (n - 1) // 2,
            "grassmann": n * self.rank,
            "permutation": len(self.permutations),
            "kronecker": int(math.log2(n)),
        }[self.mixer]

    @property
    def logits(self) -> int:
        """K: the read logits, then the write logits, then the mixer's."""
        return self.read_logits + self.write_logits + self.mixer_logits

    @property
    def coefficients(self) -> int:
        """Numbers a token's constraints give: n read weights, n write weights, then H by rows."""
        return self.n * (2 + self.n)

    @property
    def mixer_rows(self) -> int:
        """Rows of the mixer's logits as a matrix."""
        return 1 if self.mixer in ("identity", "permutation", "kronecker") else self.n

    @property
    def mixer_columns(self) -> int:
        """Its columns, padded to a power of two as Triton needs it."""
        columns = self.n if self.mixer == "cayley" else max(1, self.mixer_logits // self.mixer_rows)
        return 1 << (columns - 1).bit_length()

    @property
    def packed_permutations(self) -> tuple[int, ...]:
        """Each permutation in one integer, three bits an entry, so that a kernel can hold it as a constant."""
        return tuple(sum(image << (3 * j) for j, image in enumerate(p)) for p in self.permutations)


@functools.cache
def decode(text: str) -> Spec:
    """The record that a `Spec.key` describes."""
    return Spec(*ast.literal_eval(text))
