"""Defines the configuration: schema, loading and cross-field checks. Imports no torch."""

from megarl.config.load import ConfigError, build_config, dump_config, load_config, load_run_config
from megarl.config.schema import Config

__all__ = ["Config", "ConfigError", "build_config", "dump_config", "load_config", "load_run_config"]
