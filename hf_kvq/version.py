# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
__version__ = "0.1.0"
