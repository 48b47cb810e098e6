# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`model.generate(..., custom_generate=THIS_REPOSITORY, trust_remote_code=True)`: generate with a quantized cache."""

from transformers import GenerationMixin

import hf_kvq


# Where this code came from, which `generate` hands on to it as well.
_ABOUT_THE_CODE = ("cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision", "token")


def generate(model, inputs=None, generation_config=None, cache_implementation="pmkvq", **kwargs):
    """`model.generate` with `cache_implementation="pmkvq"`, or another cache of hf_kvq; all else is as usual."""
    hf_kvq.register()
    kwargs = {key: value for key, value in kwargs.items() if key not in _ABOUT_THE_CODE}
    # Not `model.generate`: that may be this function itself.
    return GenerationMixin.generate(
        model, inputs, generation_config=generation_config, cache_implementation=cache_implementation, **kwargs
    )
