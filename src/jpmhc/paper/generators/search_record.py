"""What an exhaustive search has done so far, and the file that keeps it so that an interrupted search can go on."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jpmhc.files import write_file
from jpmhc.paper.generators import representations
from jpmhc.paper.generators.question import Question

# Exact radii nearer than this are ties (they are right to 1e-14), and a gap below it is zero.
TIE = 1e-9

Unit = tuple[int, int]


@dataclass
class SearchRecord:
    """What a search has done: counts, and every set whose |λ₂| equals the smallest one found.

    Args:
        question: What is searched for.
        done: Units of the enumeration that are finished.
        examined: Classes looked at.
        covered: Sets in those classes.
        pruned: Classes dropped by each representation.
        sets: Radius and ranks of each set kept.
        seconds: Time spent.
        path: The file that keeps the record, if any.
    """

    question: Question
    done: set[Unit] = field(default_factory=set)
    examined: int = 0
    covered: int = 0
    pruned: dict[representations.Partition, int] = field(default_factory=dict)
    sets: list[tuple[float, list[int]]] = field(default_factory=list)
    seconds: float = 0.0
    path: Path | None = None

    @property
    def radius(self) -> float:
        """The smallest |λ₂| found; just below 1 at first, so that a set with no gap is never kept."""
        return min((radius for radius, _ in self.sets), default=1.0 - 2 * TIE)

    def add_unit(self, found: "UnitResult") -> None:
        """Add the result of a finished unit."""
        self.done.add(found.unit)
        self.examined += found.examined
        self.covered += found.covered
        for shape, count in found.pruned.items():
            self.pruned[shape] = self.pruned.get(shape, 0) + count
        self.sets += found.sets
        best = self.radius
        self.sets = [entry for entry in self.sets if entry[0] <= best + TIE]

    @classmethod
    def open(cls, question: Question, path: Path | None) -> "SearchRecord":
        """Read the record that a file holds, or begin a new one that will be kept there."""
        if path is None or not path.exists():
            return cls(question, path=path)
        try:
            kept = json.loads(path.read_text())
            record = cls(
                Question(**kept["question"]),
                {(m, p) for m, p in kept["done"]},
                kept["examined"],
                kept["covered"],
                {tuple(shape): count for shape, count in kept["pruned"]},
                [(radius, ranks) for radius, ranks in kept["sets"]],
                kept["seconds"],
                path,
            )
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not the state of a search; remove it or name another file.") from error
        if record.question != question:
            raise ValueError(f"{path} is the state of another search, {record.question}; name another file.")
        return record

    def save(self) -> None:
        """Write the record to its file, whole or not at all."""
        if self.path is None:
            return
        kept = {
            "question": asdict(self.question),
            "done": sorted(self.done),
            "examined": self.examined,
            "covered": self.covered,
            "pruned": [[shape, count] for shape, count in self.pruned.items()],
            "sets": self.sets,
            "seconds": self.seconds,
        }
        write_file(self.path, json.dumps(kept))


@dataclass
class UnitResult:
    """What one unit of the enumeration gave; the fields are those of `SearchRecord`."""

    unit: Unit
    examined: int = 0
    covered: int = 0
    pruned: dict[representations.Partition, int] = field(default_factory=dict)
    sets: list[tuple[float, list[int]]] = field(default_factory=list)
