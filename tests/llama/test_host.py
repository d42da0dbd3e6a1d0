"""The memory and the cores that the host has for this process."""

from dflash_local.llama import host


def test_meminfo_counts_what_can_be_taken_back():
    text = "MemTotal: 16000 kB\nMemFree: 1000 kB\nMemAvailable: 9000 kB\nHugePages_Total: 0\n"
    assert host.parse_meminfo(text) == (9000 * 1024, 16000 * 1024)
    assert host.parse_meminfo("MemTotal: 16000 kB\n") is None


def test_vm_stat_counts_pages_that_can_be_taken_back():
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               100.\n"
        "Pages active:                            5000.\n"
        "Pages inactive:                           200.\n"
        "Pages speculative:                         10.\n"
        "Pages purgeable:                            1.\n"
    )
    assert host.parse_vm_stat(text) == 311 * 16384


def test_the_limit_of_a_container_and_of_its_parents_counts(tmp_path):
    group = tmp_path / "user" / "job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (tmp_path / "user" / "memory.max").write_text("4000\n")
    (tmp_path / "user" / "memory.current").write_text("1500\n")
    (tmp_path / "user" / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert host.cgroup_limits("0::/user/job\n", tmp_path) == [(4000, 1000)]
    assert host.cgroup_limits("0::/../elsewhere\n", tmp_path) == []


def test_the_first_cgroup_version_is_read_too(tmp_path):
    folder = tmp_path / "memory" / "docker"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("8000\n")
    (folder / "memory.usage_in_bytes").write_text("3000\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    text = "4:cpu,cpuacct:/docker\n3:memory:/docker\n"
    assert host.cgroup_limits(text, tmp_path) == [(8000, 3000)]


def test_the_host_never_has_more_free_than_in_total():
    available, total = host.host_memory()
    assert 0 < available <= total


def test_by_default_there_are_as_many_as_cores() -> None:
    assert 1 <= host.default_threads() <= 512
