"""Stand-in compiler: the "compiled" artefact is the graph itself."""


def neuron_xla_compile(
    module_bytes,
    compiler_flags=None,
    input_format="hlo",
    platform_target="trn1",
    cache_key=None,
    retry_failed_compilation=False,
    lazy=True,
    use_cache=True,
    cache_dir=None,
    **options,
):
    if input_format != "hlo":
        raise NotImplementedError(f"input format {input_format!r}")
    return module_bytes
