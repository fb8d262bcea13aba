"""Configurations of other programs as ones of MegaRL: tables of their keys, and what reads and converts them."""

from megarl.migration.convert import Change, Migrated, convert
from megarl.migration.tables import entries, entry_of
from megarl.migration.written import read_written

__all__ = ["Change", "Migrated", "convert", "entries", "entry_of", "read_written"]
