"""One namespace of kinds, kept whole or not at all."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from headgate_sync.context import JobContext
from headgate_sync.envelope import Envelope
from headgate_sync.errors import InvalidRequest
from headgate_sync.registry import Registry
from headgate_sync.task import task


def nothing() -> None: ...


@pytest.mark.parametrize(
    "kind", ["w", "_", "0", "a<b>", "a[b]", "Job_1", "a-b.c/d+e:f", "x" * 128]
)
def test_kinds_of_the_grammar_are_accepted(kind):
    registry = Registry()
    registry.task(kind)(nothing)
    registry.task("main", aliases=[f"{kind}"[:127] + "2"])(nothing)
    assert kind in registry.kinds()


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "x" * 129,
        "-lead",
        ".lead",
        "a b",
        "a\t",
        "a\n",
        "a!",
        "a,b",
        "a*",
        "résumé:parse",
        "a·b",
    ],
)
def test_other_kinds_are_refused_also_as_aliases(kind):
    registry = Registry()
    for declare in (
        lambda: registry.task(kind)(nothing),
        lambda: registry.task("main", aliases=["ok", kind])(nothing),
        lambda: registry.raw_handler(kind)(nothing),
    ):
        with pytest.raises(InvalidRequest, match="invalid kind `"):
            declare()
    assert registry.kinds() == frozenset()


def test_a_decorator_without_its_argument_is_refused_where_it_stands():
    """Else the name would be a decorator afterwards, and nothing declared."""
    registry = Registry()
    for declare in (registry.task, registry.raw_handler, registry.periodic):
        with pytest.raises(
            InvalidRequest,
            match=rf'gets function; it is used as @{declare.__name__}\("',
        ):
            declare(nothing)
    with pytest.raises(InvalidRequest, match="is no payload class"):
        registry.handler(nothing)
    assert registry.kinds() == frozenset()


def test_a_kind_that_is_taken_leaves_nothing_of_the_second_task():
    registry = Registry()
    registry.task("a")(nothing)
    with pytest.raises(ValueError, match="kind `a` is registered more than once"):
        registry.task("b", aliases=["a"])(nothing)
    assert registry.kinds() == {"a"}
    registry.task("b")(nothing)


def test_a_second_registration_tells_where_both_stand():
    registry = Registry()

    @registry.task("a")
    def first() -> None: ...

    @registry.raw_handler("raw")
    def undecoded(envelope: Envelope) -> None: ...

    @attrs.frozen
    class Job:
        value: int

    registry.task("class")(Job)
    told = {}
    for kind in ("a", "raw", "class"):
        with pytest.raises(InvalidRequest) as refused:
            registry.task("b", aliases=[kind])(nothing)
        told[kind] = str(refused.value)
    with pytest.raises(InvalidRequest) as refused:
        registry.raw_handler("a")(nothing)
    told["second raw"] = str(refused.value)
    other = Registry()
    other.raw_handler("a")(nothing)
    with pytest.raises(InvalidRequest) as refused:
        registry.include(other)
    told["included"] = str(refused.value)
    module = "tests.client.test_registry"
    here = f"{module}.test_a_second_registration_tells_where_both_stand.<locals>"
    line = nothing.__code__.co_firstlineno
    start = first.fn.__code__.co_firstlineno
    second = f"{module}.nothing, line {line}"
    assert told == {
        "a": f"kind `a` is registered more than once: {here}.first, "
        f"line {start} and {second}",
        "raw": f"kind `raw` is registered more than once: {here}.undecoded, "
        f"line {undecoded.__code__.co_firstlineno} and {second}",
        "class": f"kind `class` is registered more than once: {here}.Job, "
        f"line {start + 6} and {second}",
        "second raw": told["a"],
        "included": told["a"],
    }


def test_a_second_handler_tells_where_both_stand():
    @attrs.frozen
    class Job:
        value: int

    registry = Registry()
    registry.task("job")(Job)

    @registry.handler(Job)
    def first(job: Job) -> None: ...

    def second(job: Job) -> None: ...

    with pytest.raises(InvalidRequest) as refused:
        registry.handler(Job)(second)
    for one in (first, second):
        place = f"{one.__qualname__}, line {one.__code__.co_firstlineno}"
        assert place in str(refused.value)


def test_a_function_without_a_file_is_told_by_its_name():
    scope: dict[str, Any] = {"__name__": "typed"}
    exec(compile("def made() -> None: ...", "<no file>", "exec"), scope)
    registry = Registry()
    registry.task("a")(scope["made"])
    with pytest.raises(InvalidRequest, match=r"more than once: typed\.made and "):
        registry.task("a")(nothing)


@pytest.mark.parametrize("aliases", [["b", "b"], ["a"]])
def test_a_task_cannot_repeat_a_kind_in_itself(aliases):
    registry = Registry()
    with pytest.raises(InvalidRequest, match="registered more than once"):
        registry.task("a", aliases=aliases)(nothing)
    assert registry.kinds() == frozenset()


def test_a_refused_class_is_not_remembered_as_a_task():
    registry = Registry()
    registry.task("taken")(nothing)

    @attrs.frozen
    class Job:
        value: int

    with pytest.raises(InvalidRequest, match="registered more than once"):
        registry.task("taken")(Job)
    registry.task("free")(Job)
    assert registry.kinds() == {"taken", "free"}


def test_one_text_is_no_list_of_aliases():
    with pytest.raises(
        InvalidRequest, match="aliases must be a sequence, got one text"
    ):
        Registry().task("a", aliases="bc")(nothing)


@pytest.mark.parametrize("version", [0, -1, "1", True, 1.0, 2**31])
def test_a_version_is_a_whole_number_from_one(version):
    with pytest.raises(InvalidRequest, match="task a: version"):
        Registry().task("a", version=version)(nothing)


def test_a_task_answers_under_its_aliases():
    registry = Registry()
    registry.task("new", aliases=["old"])(nothing)
    assert registry.resolve("old") is registry.resolve("new")
    found = registry.resolve("old")
    assert found is not None
    assert found.kind == "new"
    assert found.name == "tests.client.test_registry.nothing"


def test_a_kind_without_a_handler_resolves_to_nothing():
    registry = Registry()

    @registry.task("job")
    @attrs.frozen
    class Job:
        value: int

    assert registry.resolve("job") is None
    assert registry.resolve("unknown") is None
    registry.handler(Job)(lambda job: None)
    assert registry.resolve("job") is not None


def test_a_handler_brings_a_class_that_was_declared_without_a_registry():
    @task("elsewhere", aliases=["before"])
    @attrs.frozen
    class Job:
        value: int

    registry = Registry()
    registry.handler(Job)(lambda job: None)
    assert registry.kinds() == {"elsewhere", "before"}
    taken = Registry()
    taken.task("before")(nothing)
    with pytest.raises(
        InvalidRequest, match="kind `before` is registered more than once"
    ):
        taken.handler(Job)(lambda job: None)
    assert taken.kinds() == {"before"}


def test_a_kind_has_one_handler():
    registry = Registry()

    @registry.task("job")
    @attrs.frozen
    class Job:
        value: int

    registry.handler(Job)(lambda job: None)
    with pytest.raises(InvalidRequest, match="kind `job` has more than one handler"):
        registry.handler(Job)(lambda job: None)


def test_a_handler_belongs_to_a_task():
    class Stranger:
        pass

    with pytest.raises(
        InvalidRequest, match="Stranger'> is no payload class of a task"
    ):
        Registry().handler(Stranger)


def test_every_parameter_of_a_handler_must_be_filled():
    registry = Registry()

    @registry.task("job")
    @attrs.frozen
    class Job:
        value: int

    def two(job: Job, other: Job): ...

    def stranger(job: Job, size: int): ...

    def unannotated(job: Job, other): ...

    for function in (two, stranger, unannotated):
        with pytest.raises(InvalidRequest, match="task job: nothing fills parameter"):
            registry.handler(Job)(function)
    assert registry.resolve("job") is None

    def context_only(ctx: JobContext): ...

    registry.handler(Job)(context_only)
    assert registry.resolve("job") is not None


def test_a_raw_handler_gets_the_envelope():
    registry = Registry()
    registry.raw_handler("raw")(lambda envelope: envelope.payload)
    found = registry.resolve("raw")
    assert found is not None
    envelope = Envelope(id="a", kind="raw", payload=b"\xff", schema_version=9)
    assert found.call(found.decode(envelope), {}) == b"\xff"


def test_including_takes_over_everything_or_nothing():
    ours, theirs = Registry(), Registry()
    ours.task("a")(nothing)
    theirs.task("b", aliases=["c"])(nothing)
    ours.include(theirs)
    assert ours.kinds() == {"a", "b", "c"}
    clash = Registry()
    clash.task("z")(nothing)
    clash.task("y", aliases=["c"])(nothing)
    with pytest.raises(InvalidRequest, match="kind `c` is registered more than once"):
        ours.include(clash)
    assert ours.kinds() == {"a", "b", "c"}


def test_a_class_may_be_known_to_both_and_handled_in_one():
    @attrs.frozen
    class Job:
        value: int

    ours, theirs = Registry(), Registry()
    ours.task("job")(Job)
    theirs.handler(Job)(lambda job: None)
    ours.include(theirs)
    assert ours.resolve("job") is not None
    ours.include(theirs)
    again = Registry()
    again.handler(Job)(lambda job: None)
    with pytest.raises(InvalidRequest, match="more than one handler"):
        ours.include(again)


def test_the_queues_are_those_that_tasks_name_and_the_default():
    registry = Registry()
    registry.task("a", queue="mail")(nothing)
    registry.task("b")(nothing)
    registry.task("c", queue="bulk")(nothing)
    assert registry.queues() == ("bulk", "default", "mail")


def test_a_check_reports_every_fault_at_once():
    registry = Registry()
    registry.task("a")(late_one)
    registry.task("b")(late_two)

    @registry.task("c")
    @attrs.frozen
    class Job:
        value: int

    registry.handler(Job)(late_handler)
    with pytest.raises(InvalidRequest) as caught:
        registry.check()
    lines = caught.value.message.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["task a", "task b", "task c"]
    assert "NeverDefined" in lines[0]
    assert "NeverDefined" in lines[2]


def late_one(value: NeverDefined) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def late_two(value: NorThis) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def late_handler(job: NeverDefined) -> None: ...  # type: ignore[name-defined]  # noqa: F821
