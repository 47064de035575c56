"""Downloads that break off, resume, or fail, from a server that misbehaves in every way a server can."""

from dataclasses import replace

import pytest
from faulty_server import HASTY, NAME, have_part, sentence

from labkit.data.errors import DataError
from labkit.data.fetching import fetch

pytest_plugins = ["faulty_server"]

# --- resuming


def test_a_download_that_breaks_off_goes_on_from_there(server, entry, content):
    server.faults = ["drop", "drop"]
    fetch(entry, progress=False, patience=HASTY)
    half = len(content) // 2
    quarter = half + (len(content) - half) // 2
    assert server.requests == ["", f"bytes={half}-", f"bytes={quarter}-"]


def test_a_later_process_resumes_what_an_earlier_one_left(server, entry, part, content):
    have_part(part, content[:12345])
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == ["bytes=12345-"]


def test_a_part_that_is_whole_is_not_fetched_again(server, entry, part, content):
    have_part(part, content)
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == []


def test_a_whole_part_of_unknown_size_is_recognised_by_the_servers_416(server, entry, part, content):
    have_part(part, content)
    fetch(replace(entry, files=(replace(entry.files[0], size=None),)), progress=False, patience=HASTY)
    assert server.requests == [f"bytes={len(content)}-"]


@pytest.mark.parametrize("fault", ["no range", "wrong range", "416"])
def test_where_the_server_cannot_resume_it_starts_over(server, entry, part, content, fault):
    have_part(part, content[:5000])
    server.faults = [fault]
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests[0] == "bytes=5000-"
    assert server.requests[1:] == ([] if fault == "no range" else [""])


def test_pieces_of_a_file_that_changed_meanwhile_are_thrown_away(server, entry, part, content):
    have_part(part, bytes(5000))
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == ["bytes=5000-", ""]


def test_a_part_longer_than_the_file_is_thrown_away(server, entry, part, content):
    have_part(part, content + b"more")
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests[-1] == ""


def test_without_a_length_the_pinned_size_says_whether_it_is_whole(server, entry):
    server.faults = ["no length"]
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == [""]


def test_an_archive_labelled_as_compressed_transfer_is_kept_as_it_is(server, entry):
    server.faults = ["gzip label"]
    fetch(entry, progress=False, patience=HASTY)
    assert server.requests == [""]


# --- servers that fail


def test_a_server_that_is_busy_for_a_while_is_asked_again(server, entry, capsys):
    server.faults = ["503", "429"]
    fetch(entry, patience=HASTY)
    assert len(server.requests) == 3
    assert "503 Service Unavailable; trying again in 0 s (2 of 3)" in capsys.readouterr().err


def test_a_server_that_stays_busy_ends_in_a_sentence(server, entry):
    server.always = "503"
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    assert "in 3 attempts: the server answers 503" in sentence(error) and len(server.requests) == 3


def test_a_missing_file_is_not_asked_for_again(server, entry):
    server.always = "404"
    with pytest.raises(DataError, match="the server answers 404 Not Found"):
        fetch(entry, progress=False, patience=HASTY)
    assert len(server.requests) == 1


def test_a_server_that_refuses_ends_in_a_sentence(server, entry):
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError) as error:
        fetch(entry, progress=False, patience=HASTY)
    assert "in 3 attempts: the server refuses the connection" in sentence(error) and NAME in str(error.value)


@pytest.mark.parametrize("fault", ["silent", "trickle"])
def test_a_silent_server_ends_in_a_sentence(server, entry, fault):
    server.always = fault
    with pytest.raises(DataError, match=r"the server stays silent|only \d+ bytes came in"):
        fetch(entry, progress=False, patience=replace(HASTY, attempts=2))
    assert len(server.requests) == 2


def test_a_connection_that_always_drops_ends_in_a_sentence_and_keeps_what_came(server, entry, part, content):
    server.always = "drop"
    server.content = content[:200_000]  # less than what counts as progress
    entry = replace(entry, files=(replace(entry.files[0], size=200_000),))
    with pytest.raises(DataError, match="The 175,000 bytes that came are kept"):
        fetch(entry, progress=False, patience=HASTY)
    assert part.read_bytes() == content[:175_000]


def test_the_proxy_of_the_environment_is_used(server, entry, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.url)
    fetch(replace(entry, files=(replace(entry.files[0], url=f"http://data.invalid/{NAME}"),)), progress=False)
    assert server.hosts == ["data.invalid"]
