"""Reads configurations of other programs and converts them to MegaRL's, by tables of their keys."""

from megarl.migration.convert import Change, Migrated, convert
from megarl.migration.tables import entries, entry_of
from megarl.migration.written import read_written

__all__ = ["Change", "Migrated", "convert", "entries", "entry_of", "read_written"]
