# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Where this copy of the package registers its operators; a copy that is loaded from the Hub has a name of its own."""

NAMESPACE = "hf_kvq"
