"""Loads a `Config` from a YAML file and `key=value` overrides. A refusal is one line that says what to change."""

from __future__ import annotations

import difflib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from megarl.config import secrets
from megarl.config.schema import Config

LARGEST = 2**20
"""Limit of a configuration: bytes of its file, and nodes of its tree."""
DEEPEST = 100
MOST_INTERPOLATIONS = 1000
"""Limit of one value's interpolations."""
_INTERPOLATED = f"it stands for more than {LARGEST} nodes or letters, its interpolations written out"
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

CONFIG_FILE = "config.yaml"
"""Name of the file with the resolved configuration, in the folder of a run or an evaluation."""


class ConfigError(ValueError):
    """The configuration cannot run as written; the message is one line that says what to change."""


def load_config(source: str | Mapping[str, Any] | None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides in order, with values in YAML.

    `key=` sets the empty text, and `key={}` empties a mapping.

    Args:
        source: the file's path, or the content of such a file; None: only defaults and overrides.

    Raises:
        ConfigError: unreadable file, malformed override, unknown key (the nearest is named), value of the wrong type.
    """
    path = f"'{source}'" if isinstance(source, str) else "the configuration"
    if isinstance(source, str) and not os.path.isfile(source):
        raise ConfigError(f"no config file at {path}")
    try:
        tree: Any = read_yaml(source) if isinstance(source, str) else OmegaConf.create(dict(source or {}))
    except Exception as e:  # the parsers raise anything, such as ValueError for a number of 5,000 digits
        raise ConfigError(f"{path} is not valid YAML: {_one_line(e)}") from e
    if not OmegaConf.is_dict(tree):
        raise ConfigError(f"{path} must hold sections such as 'data:' and 'trainer:'")
    for item in overrides:
        tree = _override(tree, item)
    try:
        check_interpolations(tree)
        values: Any = OmegaConf.to_container(tree, resolve=True)
        secrets.note_written(tree)
        secrets.note_environment()
    except Exception as e:
        raise ConfigError(f"{path} with its overrides: {_one_line(e)}") from e
    return build_config(values)


def read_yaml(path: str) -> Any:
    """Parse a file with OmegaConf. Raises like `yaml_text`, and anything that OmegaConf's parsers raise."""
    return OmegaConf.load(io.StringIO(yaml_text(path)))


def yaml_text(path: str) -> str:
    """Read a YAML file's text. Raises ValueError or YAMLError if parsing it would exhaust memory or the stack.

    Aliases stand for copies: 300 letters can be a million million nodes.
    """
    if not os.path.isfile(path):
        raise ValueError("it is no file")
    if os.path.getsize(path) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    with open(path, encoding="utf-8") as f:
        text = f.read()
    _check_nodes(text)
    return text


def _check_nodes(text: str) -> None:
    sizes: dict[str | None, int] = {}
    open_nodes: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, nodes so far) of each open node
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, 1))
            if len(open_nodes) > DEEPEST:
                raise ValueError(f"it is nested more than {DEEPEST} deep")
            continue
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, LARGEST)  # of an unknown anchor, or of a node within itself
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[event.anchor] = 1
            if event.value.count("${") > MOST_INTERPOLATIONS:
                raise ValueError(f"a value has more than {MOST_INTERPOLATIONS} interpolations")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
            sizes[anchor] = size
        else:
            continue
        anchor, before = open_nodes.pop()
        open_nodes.append((anchor, before + size))
        if before + size > LARGEST:
            raise ValueError(f"it stands for more than {LARGEST} nodes, its aliases written out")


def check_interpolations(tree: Any, *, dangling: bool = False) -> None:
    """Raise ValueError if a tree becomes too large through its interpolations, each of which stands for a copy.

    Args:
        dangling: ignore interpolations that refer to missing nodes, instead of raising OmegaConf's error.
    """
    budget, resolve = LARGEST, Container.resolve_parse_tree

    def counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        nonlocal budget
        value = resolve(self, *args, **kwargs)
        budget -= len(value) if isinstance(value, str) else 1
        if budget < 0:
            raise ValueError(_INTERPOLATED)
        return value

    def value_of(node: Any, key: Any) -> Any:
        try:
            return node[key]
        except OmegaConfBaseException:
            if budget < 0 or not dangling:
                raise
            return None

    Container.resolve_parse_tree = counted  # type: ignore[method-assign]
    try:
        _nodes(tree, {}, value_of)
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _nodes(tree: Any, counts: dict[int, int], value_of: Callable[[Any, Any], Any]) -> int:
    """Count the nodes of a tree with its interpolations resolved."""
    if not OmegaConf.is_config(tree):
        return 1
    if id(tree) not in counts:
        counts[id(tree)] = LARGEST  # the count if the tree contains itself
        count = 1
        for key in list(tree) if OmegaConf.is_dict(tree) else range(len(tree)):
            count += 1 if OmegaConf.is_missing(tree, key) else _nodes(value_of(tree, key), counts, value_of)
        if count > LARGEST:
            raise ValueError(_INTERPOLATED)
        counts[id(tree)] = count
    return counts[id(tree)]


def load_run_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Load a run's configuration, with the number of ranks that a launcher started.

    Raises:
        ConfigError: as `load_config`, and if the file is a record that hides a secret which the run needs.
    """
    config = load_config(path, overrides)
    check_nothing_hidden(config)
    return with_launched_ranks(config)


def check_nothing_hidden(config: Config) -> None:
    """Raise ConfigError if a value is hidden, as in a record: the run needs it."""
    if keys := secrets.left_out(config.model_dump()):
        raise ConfigError(f"{keys[0]}: records do not show its value; give it as {keys[0]}=...")


def with_launched_ranks(config: Config) -> Config:
    """Set the number of ranks to that of the launcher (WORLD_SIZE, LOCAL_WORLD_SIZE), if a launcher started this."""
    world, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world is None or local is None:
        return config
    return with_values(config, "trainer", nnodes=int(world) // int(local), n_gpus_per_node=int(local))


def with_values(config: Config, section: str, **values: Any) -> Config:
    """Return the configuration with some values of a section replaced."""
    tree = config.model_dump()
    tree[section] |= values
    return build_config(tree)


def build_config(values: dict[str, Any]) -> Config:
    """Build a `Config` from nested values. Raises ConfigError for the first unknown key or wrong value."""
    values = secrets.filled(values)
    secrets.note_secrets(values)
    for key in _unknown_keys(values, Config):
        raise ConfigError(f"unknown key '{_cut(key)}'{_suggest(key)}")
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        given = "a value that is not shown" if secrets.names_secret(where) else _cut(secrets.hide(repr(first["input"])))
        raise ConfigError(f"{where}: {first['msg'].lower()} (got {given})") from e


_OTHER_NAMES = {
    "algorithm.name": "algorithm.adv_estimator",
    "algorithm.use_token_level_loss": "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.use_token_level_loss": "actor_rollout_ref.actor.loss_agg_mode",
    "algorithm.dynamic_sampling": "algorithm.filter_groups",
    "algorithm.overlong_reward_shaping": "reward.overlong_buffer",
}
"""Keys by the names that papers and older programs have for them."""


def dump_config(config: Config) -> str:
    """Write the configuration as YAML with every key. `secrets` describes what is hidden."""
    return OmegaConf.to_yaml(OmegaConf.create(secrets.for_records(config.model_dump())))


def all_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys that are no sections."""
    for name, field in section.model_fields.items():
        sub = field.annotation
        if isinstance(sub, type) and issubclass(sub, BaseModel):
            yield from all_keys(sub, f"{prefix}{name}.")
        else:
            yield prefix + name


def _override(tree: Any, item: str) -> Any:
    key, sep, value = item.partition("=")
    text = f"{key}={secrets.HIDDEN}" if sep and secrets.names_secret(key) else secrets.hide(item)
    if not sep or not key:
        raise ConfigError(f"override '{_cut(text)}' is not of the form key=value")
    try:
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist([item if value else f"{key}=''"]))
        if value == "{}":  # merging an empty mapping would change nothing
            OmegaConf.update(merged, key, {}, merge=False)
        return merged
    except Exception as e:
        reason = secrets.HIDDEN if text != item else _one_line(e)  # the error may quote the item
        raise ConfigError(f"override '{_cut(text)}' does not work: {reason}") from e


def _unknown_keys(values: dict[str, Any], section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        field = section.model_fields.get(str(name))
        if field is None:
            yield f"{prefix}{name}"
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and isinstance(value, dict):
            yield from _unknown_keys(value, field.annotation, f"{prefix}{name}.")


def nearest_key(key: str) -> str | None:
    """Find the key or section that a misspelt name may mean; None if none is similar."""
    if key in _OTHER_NAMES:
        return _OTHER_NAMES[key]
    names = list(all_keys())
    names += sorted({k.rsplit(".", i)[0] for k in names for i in range(1, k.count(".") + 1)})
    leaf = key.rsplit(".", 1)[-1]
    near = [k for k in names if k.rsplit(".", 1)[-1] == leaf]  # the right name in the wrong section
    if not near:  # a key of a missing feature must not be taken for another key
        alike = [k for k in names if difflib.SequenceMatcher(None, leaf, k.rsplit(".", 1)[-1]).ratio() >= 0.8]
        near = difflib.get_close_matches(key, alike, n=1, cutoff=0.0)
    return near[0] if near else None


def _suggest(key: str) -> str:
    near = nearest_key(key)
    return f"; did you mean '{near}'?" if near else ""


def _one_line(error: Exception) -> str:
    return _cut(" ".join(str(error).split()) or type(error).__name__)


def _cut(text: str, length: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[:length]}..."
