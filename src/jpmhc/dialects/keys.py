"""Find the tensors of hyper-connections in a model's state dict by the dialect's names for these tensors.

A site is the place of a connection or a head, such as "layers.0.attn"; its parts are its tensors, such as "fn".
"""

import re
from collections.abc import Mapping

from torch import Tensor

Sites = dict[str, dict[str, Tensor]]  # {a site such as "layers.0.attn": {a part's name: its tensor}}
PARTS = ("fn", "base", "scale")  # of a connection in most published models


class Naming:
    """A set of names for the tensors of a model's connections.

    Args:
        prefix: The text before every key in the published model.
        templates: For each site, such as `"layers.{}.attn"`, the key of its parts: `"layers.{}.attn_hc.[part]"`.
        parts: For each site, {part: the part's name in the key}. The entry "" is for all sites without an entry. If
            `parts` is None, all sites have the parts `PARTS` under the same names.
    """

    def __init__(self, prefix: str, templates: dict[str, str], parts: dict[str, dict[str, str]] | None = None) -> None:
        parts = parts or {"": {part: part for part in PARTS}}
        self.prefix, self.templates = prefix, templates
        self.parts = {site: parts.get(site, parts[""]) for site in templates}

    def parts_of(self, site: str) -> dict[str, str]:
        """Return {part: the part's name in the keys} of a site such as "layers.0.attn"."""
        kind = _kind_of(str(site))
        if kind not in self.parts:
            known = ", ".join(kind.format(0) for kind in self.parts)
            raise ValueError(f"{site!r} is not a connection's site in this set of names; sites are such as {known}")
        return self.parts[kind]

    def make_key(self, site: str, part: str, prefix: str | None = None) -> str:
        """Return the key of one part of a site such as "layers.0.attn"."""
        parts, number = self.parts_of(site), "".join(re.findall(r"\d+", site))
        if part not in parts:
            raise ValueError(
                f"{site} has a tensor {part!r}, for which these names have no key: this dialect's load did not make it"
            )
        key = self.templates[_kind_of(site)].format(number).replace("[part]", parts[part])
        return (self.prefix if prefix is None else prefix) + key

    def find(self, key: str) -> tuple[str, str, str] | None:
        """Return the prefix, the site and the part of a key, or None if the key is not one of these names."""
        for site, template in self.templates.items():
            names = {name: part for part, name in self.parts[site].items()}
            pattern = re.escape(template).replace(r"\{\}", r"(?P<number>\d+)")
            pattern = pattern.replace(r"\[part\]", f"(?P<part>{'|'.join(map(re.escape, names))})")
            match = re.fullmatch(rf"(?P<prefix>(?:\w+\.)*?){pattern}", key)
            if match:
                groups = match.groupdict()
                return groups["prefix"], site.format(groups.get("number")), names[groups["part"]]
        return None


def _kind_of(site: str) -> str:
    """Return a site without its number: "layers.{}.attn" for "layers.0.attn"."""
    return re.sub(r"\d+", "{}", site)


def collect_sites(state_dict: Mapping[str, Tensor], namings: Mapping[str, Naming], marker: str, dialect: str) -> Sites:
    """Return the connections' tensors by site. Raise an error for missing keys and for names of another dialect.

    Args:
        state_dict: The tensors of a model, or only of its connections.
        namings: The dialect's sets of names; all keys must be from one set.
        marker: A regular expression that every key of a connection matches, and no other key.
        dialect: The dialect's name in messages.
    """
    check_state_dict(state_dict)
    sites: Sites = {}
    used: tuple[str, str] | None = None  # the set of names and the prefix of the keys so far
    for key in (key for key in state_dict if re.search(marker, key)):
        check_numbers(state_dict[key], key)
        for name, naming in namings.items():
            match = naming.find(key)
            if match and used in (None, (name, match[0])):
                used = (name, match[0])
                sites.setdefault(match[1], {})[match[2]] = state_dict[key]
                break
        else:
            raise ValueError(f"the key {key!r} is not one of {dialect}'s, or not named like the keys before it")
    if used is None:
        raise ValueError(f"the state dict has no keys of {dialect}, such as {_example(namings)!r}")
    naming, prefix = namings[used[0]], used[1]
    for site, parts in sites.items():
        for part in naming.parts_of(site):
            if part not in parts:
                raise ValueError(f"the key {naming.make_key(site, part, prefix)!r} is missing from the state dict")
    _check_layers(sites, naming, prefix)
    return sites


def _check_layers(sites: Sites, naming: Naming, prefix: str) -> None:
    """Raise an error if a layer has no key or lacks one of the connections that other layers have."""
    for group in {pattern.split(".")[0] for pattern in naming.templates if "{}" in pattern}:
        kinds = {_kind_of(site) for site in sites if site.startswith(f"{group}.")}
        numbers = {int(site.split(".")[1]) for site in sites if site.startswith(f"{group}.")}
        for number in range(max(numbers, default=-1) + 1):
            for kind in sorted(kinds):
                if kind.format(number) not in sites:
                    part = next(iter(naming.parts[kind]))
                    key = naming.make_key(kind.format(number), part, prefix)
                    raise ValueError(f"the key {key!r} is missing from the state dict")


def _example(namings: Mapping[str, Naming]) -> str:
    naming = next(iter(namings.values()))
    site = next(site for site in naming.templates if site.startswith("layers"))
    return naming.make_key(site.format(0), next(iter(naming.parts[site])))


def check_state_dict(state_dict: object) -> None:
    """Raise an error unless the argument is a state dict (and not, for example, the model)."""
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"the state dict must hold tensors by name, as model.state_dict(), got {type(state_dict).__name__}"
        )


def check_connections(connections: object) -> None:
    """Raise an error unless the argument is a dict of connections by site, as `load` returns."""
    if not isinstance(connections, Mapping):
        raise ValueError(f"connections must be the dict by site that load returned, got {type(connections).__name__}")


def check_numbers(tensor: object, key: str) -> None:
    """Raise an error unless the argument is a tensor of floating-point numbers."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{key!r} in the state dict must be a tensor of floating-point numbers, got {kind}")


def check_shape(tensor: Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise an error unless the tensor has the given shape. The message calls the tensor `name`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(tensor.shape)}")
