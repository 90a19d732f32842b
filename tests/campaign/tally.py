"""The count of what a campaign tried and of what came out."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """How many attacks were tried, how many the package withstood, and a sentence about each of the others."""

    tried: int = 0
    held: int = 0
    failed: int = 0
    messages: list[str] = field(default_factory=list)

    def hold(self) -> None:
        """Count an attack that ended as documented: the right result, or a refusal in one sentence."""
        self.tried += 1
        self.held += 1

    def fail(self, message: str) -> None:
        """Count an attack that ended otherwise; the message says which attack it was and what came out."""
        self.tried += 1
        self.failed += 1
        self.messages.append(message)

    def add(self, other: "Tally") -> None:
        """Add the counts and the messages of another tally to this one."""
        self.tried += other.tried
        self.held += other.held
        self.failed += other.failed
        self.messages += other.messages
