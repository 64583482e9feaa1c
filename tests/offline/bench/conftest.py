from tests.kv.builders import one_thread  # noqa: F401
