# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`python -m hf_kvq.cli`: the same as `hf-kvq`."""

import sys

from . import main


sys.exit(main())
