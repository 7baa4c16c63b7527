"""Errors of loopq: one class per cause, every message says what to do next."""

from __future__ import annotations


class LoopqError(Exception):
    """Base class of every error that loopq raises on purpose."""


class ConfigError(LoopqError, ValueError):
    """A setting is not allowed; the message lists the values that are."""


class MissingExtraError(LoopqError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class CalibrationError(LoopqError):
    """Calibration data or the rollout is unusable: empty, wrong depth, a layer never called."""


class NonFiniteError(LoopqError, ValueError):
    """NaN or infinity in a weight or an activation, named by layer, step and row."""


class DumpError(LoopqError):
    """An activation dump or Hessian file is truncated, altered or does not fit together."""


class CheckpointError(LoopqError):
    """A checkpoint is truncated, altered, of an unknown version, or does not fit the model."""


class SolveError(LoopqError):
    """A layer could not be solved: the message gives layer, pivot, reason and advice."""


class KernelError(LoopqError):
    """A CUDA kernel cannot take these inputs or this device; the message says what it takes and what to do."""


class SystemContractError(LoopqError):
    """No looped system fits the model, or the model breaks the system's contract."""
