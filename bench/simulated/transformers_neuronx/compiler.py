"""Nothing is compiled; the server puts a wrapper around this function while it brings a model onto the device."""


def compile_hlo_module(hlo_module, tag=None, num_exec_repetition=1):
    return b""
