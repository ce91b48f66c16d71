"""How many descriptors a process may have."""

import resource

from harness.machine.this_process import descriptor_limit, raise_descriptor_limit


def test_a_program_may_open_what_the_system_allows_it():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert descriptor_limit() == soft - 1
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
