"""The package's logger."""

import logging

logger = logging.getLogger("torch_lowcomm")
