"""Tests that a version of torch can't run, each with the reason that the docs give users."""

from __future__ import annotations

import pytest
import torch

OLD = torch.__version__ < (2, 12)

traces_images = pytest.mark.skipif(
    OLD, reason="torch 2.11 can't trace models that put features of images in the places of tokens"
)
