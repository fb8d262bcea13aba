"""Fetches models from the Hugging Face Hub into this machine's cache: the files that a run reads, and no others.

One process of a node does it, before any rank reads a model. Ranks read the folder that is there then.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum

from megarl.checkpoint.huggingface_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    OF_TOKENIZERS,
    PICKLED,
    SINGLE,
    indexed_files,
    refuse_remote_code,
)
from megarl.checkpoint.manifest import one_line
from megarl.data.tokenizer import APART, has_tokenizer
from megarl.hub import HubModel, hub_model
from megarl.models.families import read_architecture
from megarl.plain import plain

_PLAIN = re.compile(rf"(?:{APART}/)?[\w.-]+", re.ASCII)
"""Names of files that are fetched: the Hub's list of them may hold any text, such as ../x."""
_TOKENIZER = "tokenizer"
_SAID = 10**6
"""Bytes from which on it is said that they are fetched."""
_SECONDS = 30.0
"""Until an answer of the Hub's begins; downloads have the library's own limit, HF_HUB_DOWNLOAD_TIMEOUT."""


class Wanted(Enum):
    """Says which files of a model are needed."""

    CONFIG = "config.json"
    TOKENIZER = "the tokenizer"
    WEIGHTS = "the weights"


def local_folder(path: str, wanted: Wanted) -> str:
    """Return the folder of a model, which is fetched if it is the Hub's. Raises ValueError as `pin` and `fetch`."""
    model = hub_model(path)
    if model is None:
        return path
    model = pin(model)
    fetch(model, wanted)
    return model.folder


def pin(model: HubModel, *, offline: bool = False) -> HubModel:
    """Find the commit of a model; fetches its `config.json`.

    Args:
        offline: make no request: the commit is that of the last download.

    Raises:
        ValueError: in one line that says what to do.
    """
    if model.is_pinned:
        return model
    from huggingface_hub import hf_hub_download

    with _explained(model):
        file = hf_hub_download(
            model.repository, CONFIG, revision=model.revision or None, local_files_only=offline or _is_offline()
        )
    return HubModel(model.repository, os.path.basename(os.path.dirname(file)))


def fetch(model: HubModel, wanted: Wanted, *, offline: bool = False, own_tokenizer: bool = False) -> None:
    """Make sure that the cache has the files of a pinned model; makes no request where they are there.

    The weights are fetched last, and only of a model that this program can read.

    Args:
        offline: make no request.
        own_tokenizer: refuse a model without a tokenizer.

    Raises:
        ValueError: in one line that says what to do.
    """
    missing = _missing(model.folder, wanted)
    if missing is None:
        return
    if offline or _is_offline():
        if missing == _TOKENIZER and not own_tokenizer:
            return
        raise ValueError(
            f"{model}: the cache {model.storage} has no {missing}, and no request is made here (HF_HUB_OFFLINE, or a "
            f"rank without `megarl train` or torchrun): {_by_hand(model)}"
        )
    from huggingface_hub import HfApi

    with _explained(model):
        listed = HfApi().model_info(model.repository, revision=model.revision, files_metadata=True, timeout=_SECONDS)
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings or () if _PLAIN.fullmatch(file.rfilename)}
    _download(model, [name for name in sizes if _is_small(name, wanted)], sizes)
    if own_tokenizer and not has_tokenizer(model.folder):
        raise ValueError(f"{model} has no tokenizer: name another model's, or a folder, in its tokenizer_path")
    if wanted is Wanted.WEIGHTS:
        read_architecture(model.folder)
        refuse_remote_code(model.folder)
        _download(model, _weights(model, sizes), sizes)
    if (missing := _missing(model.folder, wanted)) not in (None, _TOKENIZER):
        raise ValueError(f"{model} has no {missing}")


def _missing(folder: str, wanted: Wanted) -> str | None:
    """Name something of the wanted files that the folder lacks; None if it has them."""
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        return CONFIG
    if wanted is Wanted.WEIGHTS:
        is_indexed = os.path.isfile(os.path.join(folder, INDEX))
        files = indexed_files(folder) if is_indexed else [SINGLE]
        if absent := [name for name in files if not os.path.isfile(os.path.join(folder, name))]:
            return absent[0]
    if wanted is not Wanted.CONFIG and not has_tokenizer(folder):
        return _TOKENIZER
    return None


def _is_small(name: str, wanted: Wanted) -> bool:
    if wanted is Wanted.CONFIG:
        return name == CONFIG
    if name in (CONFIG, GENERATION_CONFIG) or OF_TOKENIZERS.fullmatch(name.removeprefix(f"{APART}/")):
        return True
    return name == INDEX and wanted is Wanted.WEIGHTS


def _weights(model: HubModel, sizes: Mapping[str, int]) -> list[str]:
    """Choose the files with the weights among those that the Hub lists. Raises ValueError if there are none."""
    files = indexed_files(model.folder) if INDEX in sizes else [SINGLE]
    if foreign := [name for name in files if not name.endswith(".safetensors")]:
        raise ValueError(f"{model}: {INDEX} names {foreign[0][:200]!r}, which is no safetensors file")
    if absent := [name for name in files if name not in sizes]:
        pickled = [name for name in sizes if name.endswith(PICKLED)]
        how = f", but pickled ones ({pickled[0][:200]!r}), which can run code when they are read" if pickled else ""
        raise ValueError(f"{model} has no {absent[0]}{how}: take a model, or a revision, with safetensors files")
    return files


def _download(model: HubModel, names: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Fetch files into the cache, one after another: threads that fetch several would not end with Ctrl-C.

    A file that is there is not fetched again, and two processes that want the same file wait for each other.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.constants import HF_HUB_CACHE

    names = [name for name in names if not os.path.exists(os.path.join(model.folder, name))]
    _check_room(model, sum(sizes[name] for name in names), HF_HUB_CACHE)
    for i, name in enumerate(names, 1):
        if sizes[name] >= _SAID:
            size = f"{sizes[name] / 1e6:,.0f} MB, file {i} of {len(names)}"
            _say(f"fetching {name} ({size}) of {model} into {model.storage}")
        with _explained(model):
            hf_hub_download(model.repository, name, revision=model.revision)


def _check_room(model: HubModel, needed: int, cache: str) -> None:
    place = os.path.abspath(cache)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"{model} takes {needed / 1e9:.1f} GB, and the disk of the cache {cache} has {free / 1e9:.1f} GB left: "
            f"make room, or set HF_HOME to another disk"
        )


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Turn the library's errors into one line that says what to do (ValueError)."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as e:
        why = f"it is gated: accept its terms on its page at {_endpoint()}/{model.repository}, and set HF_TOKEN"
        raise ValueError(f"{model}: {why} (or `hf auth login`)") from e
    except errors.RepositoryNotFoundError as e:
        raise ValueError(
            f"there is no folder '{model.repository}', and {_endpoint()} shows no such model: correct the path, or set "
            f"HF_TOKEN if the model is private"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise ValueError(f"{model.repository} has no revision '{model.revision}' on {_endpoint()}") from e
    except errors.RemoteEntryNotFoundError as e:
        raise ValueError(f"{model} has no {CONFIG}: it is no model in the format of transformers") from e
    except errors.HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else None
        token = "; HF_TOKEN may be wrong" if status in (401, 403) else ""
        raise ValueError(f"{model}: {_endpoint()} answers with status {status}{token}: {_by_hand(model)}") from e
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as e:
        if _is_offline():
            why = f"it is not in the cache {model.storage}, and HF_HUB_OFFLINE is set"
        else:
            cause = f" ({_line(e.__cause__)})" if e.__cause__ is not None else ""
            why = f"it is not in the cache {model.storage}, and {_endpoint()} does not answer as it should{cause}"
        raise ValueError(f"there is no folder '{model}'; of the Hub's model: {why}: {_by_hand(model)}") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"{model}: the disk of the cache {model.storage} is full: make room, or set HF_HOME"
            ) from e
        raise ValueError(f"{model} cannot be fetched into {model.storage}: {_line(e)}: {_by_hand(model)}") from e
    except Exception as e:  # of the HTTP library, whose classes differ from version to version
        raise ValueError(f"{model} cannot be fetched: {_line(e)}: {_by_hand(model)}") from e


def _line(error: BaseException) -> str:
    return f"{type(error).__name__} {plain(one_line(error))[:200]}"


def _by_hand(model: HubModel) -> str:
    revision = f" --revision {model.revision}" if model.revision else ""
    return f"where there is a network, run `hf download {model.repository}{revision}`, or set the path to a folder"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _say(text: str) -> None:
    print(f"megarl: {plain(text)}", file=sys.stderr, flush=True)
