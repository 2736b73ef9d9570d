"""JSON schemas of real life: which texts are written for one, as parts of a regular language.

What is written is a part of what a schema allows: properties in their declared order and no
others, at most one blank behind a comma or a colon, numbers without an exponent, recursion and
values of any kind to a depth.  Annotations, unknown keywords and keywords of other types count for
nothing, as in the standard.  What cannot be kept is refused with its path.

A keyword that stands for other schemas is a method in `Reader.COMBINING`; two schemas that both
hold are one after `merged`, keyword by keyword as `MERGE` says; a type is a method in
`Reader.TYPES`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cached_property, partial
from itertools import combinations
from typing import Any, ClassVar, NoReturn
from urllib.parse import unquote

from ..core.errors import ConfigError, one_line, short
from .expressions import CHARACTER, CHARACTERS, pattern_part, regex_part, string_bytes
from .formats import ANNOTATIONS, FORMATS, UNCHECKED
from .numbers import numbers
from .parts import (
    EMPTY,
    Budget,
    ByteAutomaton,
    Bytes,
    Either,
    Leaf,
    Members,
    Mixed,
    Part,
    Repeat,
    Row,
    TooLarge,
    Unfit,
    automaton_of,
    combined,
    maybe,
)

DEPTH = 3  # of recursive schemas, and of values of any kind
DEEPEST = 12  # arrays and objects within one another, in schemas that may not hold
MOST_NEEDED = 3, 6  # properties that stand in any order; in schemas that may not hold
MOST_PARTS = 20_000  # schemas that are read
MOST_PAIRS = 256  # of alternatives that two schemas have
MOST_UNIQUE = 6  # values that may stand in any order in an array without equal items
COMMA, COLON = Row((Bytes(b","), maybe(Bytes(b" ")))), Row((Bytes(b":"), maybe(Bytes(b" "))))
QUOTE = Bytes(b'"')
KEYWORDS: dict[str, set[Any]] = {
    "object": {"properties", "required", "additionalProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
              "contains", "minContains", "maxContains"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set(), "null": set(),
}  # fmt: skip
NAMES = (*KEYWORDS, "integer")
REFUSED = {
    "contains", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
Schema = Mapping[str, Any]


class Nothing(Unfit):
    """A schema that no value satisfies."""


class TooDeep(Nothing):
    """One that contains itself, beyond the depth that is written."""


class Reader:
    """Reads the parts of one schema.  ``depth``: of what contains itself; ``ignored``: unknown
    keywords that were met; ``cut``: whether something was written to a depth.

    ``loose``: properties stand in any order, with undeclared ones between them.  ``testing``: every
    text is read that another reader writes for a value that satisfies the schema, in order to take
    it away.
    """

    def __init__(
        self, root: Schema, budget: Budget, depth: int = DEPTH, loose: bool = False,
        testing: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.budget, self.depth, self.loose = root, budget, depth, loose or testing
        self.testing = testing
        self.open: list[str] = []  # references that are being followed
        self.parts = 0
        self.ignored: dict[str, None] = {}
        self.cut = False  # whether something was written to a depth
        self._leaves: dict[Any, Leaf] = {}
        self._read: dict[Any, tuple[Any, Part | Nothing]] = {}
        self._any: dict[int, Part] = {}

    def read(self) -> Part:
        """The texts of the schema.  Raises `ConfigError`, `Unfit`."""
        try:
            return self.value(self.root, "#")
        except TooDeep:
            raise ConfigError(
                "the schema contains itself without end: make what leads back optional"
            ) from None
        except Nothing as error:
            raise ConfigError(f"{error} of the schema allows no value") from None
        except (AttributeError, TypeError, LookupError, OverflowError, RecursionError,
                ValueError) as error:  # fmt: skip
            if isinstance(error, ConfigError | Unfit):
                raise
            raise ConfigError(f"the schema is not well formed: {one_line(error)}") from None

    def value(self, schema: Any, path: str) -> Part:
        """The texts of a schema; remembered."""
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise TooLarge(f"has more than {MOST_PARTS:,} parts: allow less")
        self.budget.spend()
        if schema is True:
            return self.anything(self.depth)
        if not isinstance(schema, Mapping):
            if schema is False:
                raise Nothing(path)
            raise ConfigError(f"{path} of the schema is {short(schema)}, which is no schema")
        key = id(schema), *sorted(self.open)
        if key not in self._read:
            try:
                self._read[key] = schema, self._value(schema, path)
            except Nothing as error:
                self._read[key] = schema, error
        found = self._read[key][1]
        if isinstance(found, Nothing):
            raise found
        return found

    def _value(self, given: Schema, path: str) -> Part:
        schema = {key: value for key, value in given.items() if self._counts(key)}
        for key in sorted(REFUSED & schema.keys()):
            raise ConfigError(f"{path} of the schema has {key!r}, which is not supported")
        for key, combine in self.COMBINING.items():
            if key in schema:
                return combine(self, schema, path)
        if "const" in schema or "enum" in schema:
            return self._constants(schema, path)
        types = _types(schema, path)
        if self.testing and types and "type" not in schema:
            types = [*KEYWORDS]
        if types is None:
            return self.anything(self.depth)
        return self._either([partial(self.TYPES[name], self, schema, path) for name in types], path)

    def _counts(self, key: str) -> bool:
        """Whether a keyword says something about values."""
        if key in CHECKED:
            return True
        if key not in ANNOTATIONS and not key.startswith("x-"):
            self.ignored[str(key)] = None
        return False

    def _either(self, parts: Sequence[Callable[[], Part]], path: str) -> Part:
        """Alternatives, those left out that allow nothing."""
        found, failed = [], Nothing(path)
        for part in parts:
            try:
                found.append(part())
            except Nothing as error:
                failed = error
        if not found:
            raise failed
        return found[0] if len(found) == 1 else Either(tuple(dict.fromkeys(found)))

    def leaf(self, key: Any, make: Callable[[], Part | ByteAutomaton]) -> Leaf:
        """What ``make`` makes, as a leaf; remembered by ``key``."""
        if key not in self._leaves:
            made = make()
            automaton = made if isinstance(made, ByteAutomaton) else automaton_of(made, self.budget)
            self._leaves[key] = Leaf(automaton)
        return self._leaves[key]

    def text(self) -> Leaf:
        """Any string."""
        return self.leaf("text", lambda: Row((QUOTE, CHARACTERS, QUOTE)))

    def anything(self, depth: int) -> Part:
        """Any JSON value, arrays and objects nested to a depth."""
        if self.testing:
            return self.nested()
        if depth not in self._any:
            self.cut = True
            number = self.leaf("number", lambda: regex_part(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"))
            parts: list[Part] = [self.text(), number, *map(Bytes, (b"true", b"false", b"null"))]
            if depth:
                inner = self.anything(depth - 1)
                member = Row((self.text(), COLON, inner))
                parts += listed(b"[", inner, b"]"), listed(b"{", member, b"}")
            self._any[depth] = Either(tuple(parts))
        return self._any[depth]

    def nested(self) -> Leaf:
        """What any JSON text is made of, whatever its brackets enclose, to a depth."""
        plain, inner = regex_part("[a-z0-9.-]+"), Either((self.text(), regex_part(r'[^"\[\]{}]')))
        bracketed: Part = Either(())
        for _ in range(DEEPEST):
            within = Repeat(Either((inner, bracketed)), 0, None)
            bracketed = Row((regex_part(r"[\[{]"), within, regex_part(r"[\]}]")))
        return self.leaf("nested", lambda: Either((self.text(), plain, bracketed)))

    # -- keywords that stand for other schemas --------------------------------------------------

    def resolve(self, name: Any, path: str) -> Any:
        """What a reference stands for."""
        if isinstance(name, str) and not name.startswith("#"):
            own = self.root.get("$id", self.root.get("id"))
            if isinstance(own, str) and own and name.startswith(own.rstrip("#")):
                name = "#" + name[len(own.rstrip("#")) :].lstrip("#")
        if not isinstance(name, str) or not name.startswith("#"):
            raise ConfigError(f"{path} of the schema refers to {short(name)}: keep it in one file")
        target: Any = self.root
        for key in name[1:].strip("/").split("/") if name.strip("#/") else ():
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise ConfigError(f"{path} of the schema refers to {name}, which is not there")
        return target

    def _followed(self, parts: Sequence[Any], rest: Schema, path: str) -> Part:
        """The schema of all ``parts`` and ``rest`` together, references followed."""
        opened = len(self.open)
        try:
            todo, schema = list(parts), dict(rest)
            while todo:
                self.budget.spend()
                part = todo.pop(0)
                if isinstance(part, Mapping) and "$ref" in part:
                    name = part["$ref"]
                    if self.open.count(name) >= self.depth:
                        self.cut = True
                        if self.testing:
                            self._refuse("$ref", path)
                        raise TooDeep(path)
                    target = self.resolve(name, path)
                    self.open.append(name)
                    alone = not (part.keys() - {"$ref"}) & CHECKED
                    if alone and not todo and not schema:
                        return self.value(target, name)
                    todo[:0] = [target, *([] if alone else [without(part, "$ref")])]
                elif isinstance(part, Mapping) and "allOf" in part:
                    todo[:0] = [*part["allOf"], without(part, "allOf")]
                else:
                    found = merged(schema, part, path)
                    if found is False:
                        raise Nothing(path)
                    schema = found
            return self.value(schema or True, path)
        finally:
            del self.open[opened:]

    def _reference(self, schema: Schema, path: str) -> Part:
        return self._followed([schema], {}, path)

    def _all(self, schema: Schema, path: str) -> Part:
        return self._followed(schema["allOf"], without(schema, "allOf"), path)

    def _any_of(self, schema: Schema, path: str) -> Part:
        key = "anyOf" if "anyOf" in schema else "oneOf"
        rest, parts = without(schema, key), list(schema[key])
        others = [list[Any]() for _ in parts]  # that may hold with each
        if key == "oneOf" and not self._differ(parts, path):
            for i, part in enumerate(parts):
                for j, other in enumerate(parts[:i]):
                    self.budget.spend(20)
                    if not self._apart(part, other, path):
                        others[i].append(other)
                        others[j].append(part)

        def one(i: int) -> Part:
            where = f"{path}/{key}/{i}"
            part = self._followed([parts[i]], rest, where) if rest else self.value(parts[i], where)
            return self._left(part, others[i], path)

        return self._either([partial(one, i) for i in range(len(parts))], path)

    def _differ(self, parts: Sequence[Any], path: str) -> bool:
        """Whether schemas are constants, no two of which are the same."""
        constant = [_constants_of(self._target(part, path)) for part in parts]
        keys = [key for values in constant for key in {*map(_same, values or ())}]
        return None not in constant and len({*keys}) == len(keys)

    def _not(self, schema: Schema, path: str) -> Part:
        return self._left(self.value(without(schema, "not") or True, path), [schema["not"]], path)

    def _left(self, part: Part, schemas: Sequence[Any], path: str) -> Part:
        """What of a part satisfies none of the ``schemas``."""
        for schema in schemas:
            if self.loose and not self.testing:
                raise ConfigError(f"{path} of the schema has what may not hold, beside extra_keys")
            try:
                held = automaton_of(self.tester.value(schema, path), self.budget)
            except Nothing:
                continue
            found = automaton_of(part, self.budget)
            if not self.testing:
                with contextlib.suppress(Nothing):
                    self._met(found, self.tester.nested().automaton, path, without=True)
                    self._refuse("what is nested deeply", path)
            part = Leaf(self._met(found, held, path, without=True))
        return part

    @cached_property
    def tester(self) -> Reader:
        return Reader(self.root, self.budget, self.depth, testing=True)

    def _refuse(self, what: str, path: str) -> NoReturn:
        raise ConfigError(
            f"{path} of the schema has to keep {what} from holding, for oneOf, not or if, which "
            "is not supported: use anyOf, or a required property with a const of its own in each"
        )

    def _target(self, schema: Any, path: str) -> Schema:
        """What a schema that is a reference stands for."""
        for _ in range(8):
            if isinstance(schema, Mapping) and "$ref" in schema:
                schema = self.resolve(schema["$ref"], path)
            elif isinstance(schema, Mapping) and len(schema.get("allOf", ())) == 1:
                (only,) = schema["allOf"]
                found = merged(without(schema, "allOf"), self._target(only, path), path)
                schema = found if isinstance(found, Mapping) else {}
        return schema if isinstance(schema, Mapping) else {}

    def _apart(self, a: Any, b: Any, path: str) -> bool:
        """Whether no value satisfies both, as far as types, constants, required properties and
        bounds tell."""
        if a is False or b is False:
            return True
        a, b = self._target(a, path), self._target(b, path)
        mine, other = _constants_of(a), _constants_of(b)
        if mine is not None and other is not None:
            return not {*map(_same, mine)} & {*map(_same, other)}
        kinds, others = _kinds(a), _kinds(b)
        if kinds is not None and others is not None and not kinds & others:
            return True
        if "object" in (kinds or ()) and kinds == others:
            mine_, theirs = a.get("properties", {}), b.get("properties", {})
            required = {*a.get("required", ())}, {*b.get("required", ())}
            if a.get("additionalProperties") is False and required[1] - {*mine_}:
                return not a.get("patternProperties")
            if b.get("additionalProperties") is False and required[0] - {*theirs}:
                return not b.get("patternProperties")
            for name in required[0] & required[1]:
                if (
                    name in mine_
                    and name in theirs
                    and self._apart(mine_[name], theirs[name], path)
                ):
                    return True
        return False

    def _dependencies(self, schema: Schema, path: str) -> Part:
        """Each property that asks for others: alternatives without it, and with them."""
        rest = {k: v for k, v in schema.items() if k not in DEPENDENCIES}
        alternatives: list[Any] = [rest]
        for key in DEPENDENCIES:
            for name, needs in schema.get(key, {}).items():
                more: Any = {"required": list(needs)} if isinstance(needs, list) else needs
                if not self.loose and name not in rest.get("properties", {}):
                    continue  # it is not written
                with_ = merged({"required": [name]}, more, path)
                pair = [{"properties": {name: False}}, with_]
                alternatives = [merged(a, b, path) for a in alternatives for b in pair]
                if len(alternatives) > MOST_PAIRS:
                    raise ConfigError(f"{path} of the schema has too many dependencies")
        return self._either([partial(self.value, each, path) for each in alternatives], path)

    def _if(self, schema: Schema, path: str) -> Part:
        rest = {key: value for key, value in schema.items() if key not in CONDITION}
        then, other = schema.get("then", True), schema.get("else", True)
        if then is True and other is True:
            return self.value(rest or True, path)
        return self._either([
            partial(self._followed, [schema["if"], then], rest, path),
            lambda: self._left(self._followed([other], rest, path), [schema["if"]], path),
        ], path)  # fmt: skip

    # -- values ----------------------------------------------------------------------------------

    def _constants(self, schema: Schema, path: str) -> Part:
        values = _constants_of(schema) or []
        if "enum" in schema and "const" in schema:
            allowed = {*map(_same, schema["enum"])}
            values = [v for v in values if _same(v) in allowed]
        if "type" in schema:
            wanted = _listed(schema["type"])
            values = [v for v in values if any(_is(v, kind) for kind in wanted)]
        self.budget.spend(len(values))
        rest = {k: v for k, v in schema.items() if k not in ("enum", "const", "type")}
        if values and any(rest.keys() & KEYWORDS[_kind(v)] for v in values):
            kinds = {_kind(v) for v in values}
            automata = {
                kind: automaton_of(self.value({**rest, "type": kind}, path), self.budget)
                for kind in kinds if rest.keys() & KEYWORDS[kind]
            }  # fmt: skip
            values = [
                v for v in values
                if _kind(v) not in automata or automata[_kind(v)].accepts(_written(v))
            ]  # fmt: skip
        if not values:
            raise Nothing(path)
        found = [self.constant(value) for value in values]
        return found[0] if len(found) == 1 else Either(tuple(found))

    def constant(self, value: Any) -> Part:
        """One value as it is written."""
        if isinstance(value, Mapping):
            if self.testing and len(value) > 1:
                self._refuse("an object", "a constant")
            members = [
                (Row((Bytes(_quoted(k)), COLON, self.constant(v))), True) for k, v in value.items()
            ]
            return Row((Bytes(b"{"), Members(tuple(members), COMMA), Bytes(b"}")))
        if isinstance(value, list | tuple):
            items = [(self.constant(item), True) for item in value]
            return Row((Bytes(b"["), Members(tuple(items), COMMA), Bytes(b"]")))
        if self.testing and _kind(value) == "number":
            return self._number({"minimum": value, "maximum": value}, "a constant")
        return Bytes(_written(value))

    def _string(self, schema: Schema, path: str) -> Part:
        least, most = _range(schema, "minLength", "maxLength", path)
        patterns, form = _patterns(schema), schema.get("format")
        if form is not None and form not in FORMATS and form not in UNCHECKED:
            if form in STANDARD:
                raise ConfigError(
                    f"{path} of the schema has the format {short(form)}; supported: "
                    + ", ".join(sorted(FORMATS))
                )
            form = None
        form = form if form in FORMATS else None
        if form is not None and self.testing:
            self._refuse(f"the format {form!r}", path)
        key = (*patterns, form, least, most)
        return self.leaf(("string", *key), lambda: self._quoted(patterns, form, least, most, path))

    def _quoted(
        self, patterns: Sequence[str], form: str | None, least: int, most: int | None, path: str
    ) -> Part | ByteAutomaton:
        parts = [self._pattern_part(pattern, path) for pattern in patterns]
        if form is not None:
            parts.append(regex_part(FORMATS[form]))
        if (least, most) != (0, None) or not parts:
            parts.append(Repeat(CHARACTER, least, most))
        quoted = [Row((QUOTE, part, QUOTE)) for part in parts]
        if len(quoted) == 1:
            return quoted[0]
        result, *others = (automaton_of(part, self.budget) for part in quoted)
        for other in others:
            result = self._met(result, other, path)
        return result

    def _met(
        self, a: ByteAutomaton, b: ByteAutomaton, path: str, without: bool = False
    ) -> ByteAutomaton:
        try:
            return combined(a, b, self.budget, without)
        except TooLarge:
            raise
        except Unfit:
            raise Nothing(path) from None

    def _integer(self, schema: Schema, path: str) -> Part:
        return self._number(schema, path, whole=True)

    def _number(self, schema: Schema, path: str, whole: bool = False) -> Part:
        low, high, above, below = _bounds(schema, path)
        step = schema.get("multipleOf")
        if step is not None and (not _is(step, "number") or step <= 0):
            raise ConfigError(f"{path} of the schema has a multipleOf that is no positive number")

        def make(step: float | None, whole: bool) -> ByteAutomaton:
            try:
                return numbers(low, high, above, below, step, whole, self.budget)
            except TooLarge:
                raise
            except Unfit:
                raise Nothing(path) from None

        def leaf(step: float | None, whole: bool) -> Leaf:
            return self.leaf(
                ("number", low, high, above, below, step, whole), lambda: make(step, whole)
            )

        if self.testing and whole:  # with zeros behind a point
            integer, found = leaf(1, False), leaf(step, False)
            return Leaf(self._met(integer.automaton, found.automaton, path))
        return leaf(step, whole)

    def _boolean(self, schema: Schema, path: str) -> Part:
        return Either((Bytes(b"true"), Bytes(b"false")))

    def _null(self, schema: Schema, path: str) -> Part:
        return Bytes(b"null")

    def _array(self, schema: Schema, path: str) -> Part:
        least, most = _range(schema, "minItems", "maxItems", path)
        rest, first = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(rest, list):  # as before 2020-12
            rest, first = schema.get("additionalItems", True), rest
        if schema.get("uniqueItems") and (most is None or most > 1):
            return self._unique(rest if not first else None, least, most, path)
        parts: list[Part] = []
        each: Part | None = None
        for i, part in enumerate(first):
            try:
                parts.append(self.value(part, f"{path}/prefixItems/{i}"))
            except Nothing:
                most = i if most is None else min(most, i)
                break
        try:
            each = self.value(rest, f"{path}/items") if len(parts) == len(first) else None
        except Nothing:
            most = len(parts) if most is None else min(most, len(parts))
        if most is not None and least > most:
            raise Nothing(path)
        if most is not None:
            parts = parts[:most]
            self.budget.spend(most)
        else:
            self.budget.spend(least)
        ends = max(least, len(parts)) if most is None else most
        loop: Part = EMPTY  # what may stand behind so many items
        if most is None and each is not None:
            loop = Repeat(Row((COMMA, each)), 0, None)
            ends = max(ends, 1)
        for n in range(ends - 1, -1, -1):
            item = parts[n] if n < len(parts) else each
            assert item is not None
            loop = Row((COMMA if n else EMPTY, item, loop))
            loop = loop if n < least else Either((loop, EMPTY))
        return Row((Bytes(b"["), loop, Bytes(b"]")))

    def _unique(self, items: Any, least: int, most: int | None, path: str) -> Part:
        """Items that differ: of a few constants, in any order."""
        values = None if items is None else _constants_of(self._target(items, path))
        if isinstance(items, Mapping) and _kinds(self._target(items, path)) == {"boolean"}:
            values = values or [True, False]
        if values is None or len(values) > MOST_UNIQUE:
            raise ConfigError(
                f"{path} of the schema has 'uniqueItems', which is supported for items of at most "
                f"{MOST_UNIQUE} constants"
            )
        texts = [self.constant(value) for value in values]
        most = len(texts) if most is None else min(most, len(texts))
        if least > most:
            raise Nothing(path)
        tails: dict[frozenset[int], Part] = {}
        for size in range(most, -1, -1):
            for used in map(frozenset, combinations(range(len(texts)), size)):
                ways: list[Part] = [EMPTY] if size >= least else []
                for i in range(len(texts)) if size < most else ():
                    if i not in used:
                        comma = COMMA if size else EMPTY
                        ways.append(Row((comma, texts[i], tails[used | {i}])))
                tails[used] = Either(tuple(ways))
        return Row((Bytes(b"["), tails[frozenset()], Bytes(b"]")))

    def _object(self, schema: Schema, path: str) -> Part:
        least, most = _range(schema, "minProperties", "maxProperties", path)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        if isinstance(required, str) or not all(isinstance(name, str) for name in required):
            if isinstance(required, bool):  # as before draft 4
                required = ()
            else:
                raise ConfigError(f"{path} of the schema has a required that is no list of names")
        more, named = schema.get("additionalProperties", True), schema.get("patternProperties", {})
        keys = schema.get("propertyNames", True)
        needed = {*required}
        declared = {**properties, **{name: more for name in required if name not in properties
                                     and not self._matching(named, name, path)},
                    **{name: {} for name in required if name not in properties
                       and self._matching(named, name, path)}}  # fmt: skip
        members: list[tuple[Part, bool]] = []
        for name, part in declared.items():
            also = [named[pattern] for pattern in self._matching(named, name, path)]
            try:
                if keys is not True and not self._key(keys, path).accepts(_quoted(name)):
                    raise Nothing(path)
                where = f"{path}/properties/{name}"
                value = (
                    self._followed(also, part, where)
                    if also and isinstance(part, Mapping)
                    else self.value(part, where)
                )
            except Nothing:
                if name in needed:
                    raise
                continue
            members.append((Row((Bytes(_quoted(name)), COLON, value)), name in needed))
        # A name may be written twice; the last counts, so that not so many names are sure.
        if self.testing or (self.loose and least < 2):
            most_needed = MOST_NEEDED[self.testing]
            if self.testing and len(needed) > most_needed:
                self._refuse(f"more than {most_needed} required properties", path)
            others = self._others(more, named, keys, path, [*declared])
            if others is not None:
                members.append((others, False))
            mixed = Mixed(tuple(members), COMMA, least, most, len(needed) > most_needed)
            return Row((Bytes(b"{"), mixed, Bytes(b"}")))
        if declared:
            if least > len(members):
                raise Nothing(path)
            low = least if least > sum(need for _, need in members) else 0
            top = None if most is None or most >= len(members) else most
            return Row((Bytes(b"{"), Members(tuple(members), COMMA, low, top), Bytes(b"}")))
        others = self._others(more, named, keys, path)
        if others is None and least:
            raise Nothing(path)
        return Bytes(b"{}") if others is None else listed(b"{", others, b"}", least, most)

    def _matching(self, named: Schema, name: str, path: str) -> list[str]:
        """The patterns of properties that a name matches."""
        return [p for p in named if self._pattern(p, path).accepts(_quoted(name))]

    def _pattern(self, pattern: str, path: str) -> ByteAutomaton:
        part = partial(self._pattern_part, pattern, path)
        return self.leaf(("pattern", pattern), lambda: Row((QUOTE, part(), QUOTE))).automaton

    def _pattern_part(self, pattern: str, path: str) -> Part:
        return pattern_part(pattern, f"{path} of the schema", self.testing)

    def _key(self, schema: Any, path: str) -> ByteAutomaton:
        """The names that a schema of names allows."""
        if schema is True:
            return self.text().automaton
        with_type = merged({"type": "string"}, schema, path)
        return automaton_of(self.value(with_type, f"{path}/propertyNames"), self.budget)

    def _others(
        self, more: Any, named: Schema, keys: Any, path: str, declared: Sequence[str] = ()
    ) -> Part | None:
        """A member that is not ``declared``; None where there is none."""
        allowed = self._key(keys, path)
        if declared:
            names = Either(tuple(Bytes(_quoted(name)) for name in declared))
            try:
                allowed = self._met(allowed, automaton_of(names, self.budget), path, without=True)
            except Nothing:
                return None
        if self.testing and len(named) > 1:
            self._refuse("several patternProperties", path)
        groups: list[tuple[ByteAutomaton, Any]] = []
        left: ByteAutomaton | None = allowed
        for pattern, schema in named.items():
            mine: ByteAutomaton | None = None
            try:
                mine = self._met(allowed, self._pattern(pattern, path), path)
                for other in named:
                    if other != pattern:  # keys of one pattern alone are written
                        mine = self._met(mine, self._pattern(other, path), path, without=True)
                groups.append((mine, schema))
            except Nothing:
                pass
            try:
                left = left and self._met(left, self._pattern(pattern, path), path, without=True)
            except Nothing:
                left = None
        if left is not None:
            groups.append((left, more))
        ways: list[Part] = []
        for automaton, schema in groups:
            try:
                value = self.value(schema, f"{path}/additionalProperties")
            except Nothing:
                continue
            ways.append(Row((Leaf(automaton), COLON, value)))
        return Either(tuple(ways)) if ways else None

    COMBINING: ClassVar[dict[str, Callable[[Reader, Schema, str], Part]]] = {
        "$ref": _reference, "if": _if, "allOf": _all, "not": _not, "anyOf": _any_of,
        "oneOf": _any_of, "dependencies": _dependencies, "dependentRequired": _dependencies,
        "dependentSchemas": _dependencies,
    }  # fmt: skip
    TYPES: ClassVar[dict[str, Callable[[Reader, Schema, str], Part]]] = {
        "object": _object, "array": _array, "string": _string, "number": _number,
        "integer": _integer, "boolean": _boolean, "null": _null,
    }  # fmt: skip


DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
STANDARD = {"date", "time", "date-time", "duration", "email", "idn-email", "hostname",
            "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid",
            "uri-template", "json-pointer", "relative-json-pointer", "regex"}  # fmt: skip
CONDITION = ("if", "then", "else")
CHECKED = {*Reader.COMBINING, *REFUSED, *CONDITION, "const", "enum", "type"}.union(
    *KEYWORDS.values()
)


def listed(begin: bytes, item: Part, end: bytes, least: int = 0, most: int | None = None) -> Part:
    """Items with commas between them."""
    if most == 0:
        return Bytes(begin + end)
    more = Repeat(Row((COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
    some = Row((item, more))
    return Row((Bytes(begin), some if least else Either((some, EMPTY)), Bytes(end)))


def _written(value: Any) -> bytes:
    """One value as JSON, numbers without an exponent."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{Decimal(repr(value)):f}".encode()
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _quoted(name: str) -> bytes:
    return b'"' + string_bytes(name) + b'"'


def without(schema: Schema, key: str) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != key and k in CHECKED}


# -- two schemas that both hold ------------------------------------------------------------------


def merged(a: Any, b: Any, path: str) -> Any:
    """One schema of the values that satisfy both."""
    if a is True or b is True:
        return b if a is True else a
    if a is False or b is False:
        return False
    for each in (a, b):
        if not isinstance(each, Mapping):
            raise ConfigError(f"{path} of the schema is {short(each)}, which is no schema")
    a, b = ({k: v for k, v in each.items() if k in CHECKED} for each in (a, b))
    if not a or not b:
        return a or b or {}
    if "if" in a and "if" in b:
        condition = {key: b[key] for key in CONDITION if key in b}
        rest = {key: value for key, value in b.items() if key not in CONDITION}
        b = {**rest, "allOf": [*rest.get("allOf", ()), condition]}
    result = {**a, **b}
    for key in a.keys() & b.keys():
        if a[key] == b[key] and key not in OBJECT:
            continue
        if key in OBJECT:
            continue
        if key not in MERGE:
            raise ConfigError(
                f"{path} of the schema has several {key!r} at once: write them as one"
            )
        result[key] = MERGE[key](a[key], b[key], path)
    if (a.keys() | b.keys()) & OBJECT:
        result |= _merged_members(a, b, path)
    if result.get("type") == []:
        return False
    return result


OBJECT = {"properties", "patternProperties", "additionalProperties"}


def _merged_members(a: Schema, b: Schema, path: str) -> dict[str, Any]:
    """Keywords about the members of an object.  A property that one of them does not declare is
    one of its additional ones, or of those of its patterns."""
    properties: dict[str, Any] = {}
    named = [each.get("patternProperties", {}) for each in (a, b)]
    declared = [each.get("properties", {}) for each in (a, b)]
    more = [each.get("additionalProperties", True) for each in (a, b)]
    for name in dict.fromkeys((*declared[0], *declared[1])):
        sides: list[Any] = []
        for mine, patterns, others in zip(declared, named, more, strict=True):
            if name in mine:
                sides.append(mine[name])
            elif not patterns:
                sides.append(others)
            elif others is not True:
                raise ConfigError(f"{path} of the schema has patternProperties in allOf")
        properties[name] = _conjoined(sides)
    if named[0] and named[1] and more != [True, True]:
        raise ConfigError(f"{path} of the schema has patternProperties in allOf")
    patterns = {
        pattern: _conjoined([each[pattern] for each in named if pattern in each])
        for pattern in (*named[0], *named[1])
    }
    found = {"properties": properties, "patternProperties": patterns,
             "additionalProperties": _conjoined(more)}  # fmt: skip
    return {key: value for key, value in found.items() if key in a or key in b}


def _conjoined(schemas: Sequence[Any]) -> Any:
    """All of them, merged where they are read."""
    if False in [each for each in schemas if isinstance(each, bool)]:
        return False
    rest = [each for each in schemas if each is not True and each != {}]
    return rest[0] if len(rest) == 1 else {"allOf": rest} if rest else True


def _merged_types(u: Any, v: Any, path: str) -> list[str]:
    mine, other = (
        {*_listed(x)} | ({"integer"} if "number" in _listed(x) else set()) for x in (u, v)
    )
    found = mine & other
    return sorted(found - {"integer"} if "number" in found else found)


def _merged_ways(u: Any, v: Any, path: str) -> list[Any]:
    """Alternatives of both: pairs."""
    if len(u) * len(v) > MOST_PAIRS:
        raise ConfigError(f"{path} of the schema has too many alternatives in allOf")
    return [{"allOf": [x, y]} for x in u for y in v]


def _merged_steps(u: Any, v: Any, path: str) -> Any:
    if int(u) != u or int(v) != v:
        raise ConfigError(f"{path} of the schema has several 'multipleOf' at once")
    return math.lcm(int(u), int(v))


def _strictest(pick: Callable[..., Any]) -> Callable[[Any, Any, str], Any]:
    def merge(u: Any, v: Any, path: str) -> Any:
        if isinstance(u, bool) or isinstance(v, bool):  # as before draft 6
            raise ConfigError(f"{path} of the schema has bounds of two drafts at once")
        return pick(u, v)

    return merge


MERGE: dict[str, Callable[[Any, Any, str], Any]] = {
    "type": _merged_types,
    "required": lambda u, v, path: list(dict.fromkeys((*u, *v))),
    "enum": lambda u, v, path: [x for x in u if _same(x) in {*map(_same, v)}],
    "const": lambda u, v, path: u if _same(u) == _same(v) else _none(path),
    "pattern": lambda u, v, path: (*_listed(u), *_listed(v)),
    "not": lambda u, v, path: {"anyOf": [u, v]},
    "items": lambda u, v, path: (_none(path, "items") if isinstance(u, list) or isinstance(v, list)
                                 else _conjoined([u, v])),
    "propertyNames": lambda u, v, path: _conjoined([u, v]),
    "uniqueItems": lambda u, v, path: u or v,
    "allOf": lambda u, v, path: [*u, *v],
    "anyOf": _merged_ways, "oneOf": _merged_ways, "multipleOf": _merged_steps,
    "dependentRequired": lambda u, v, path: {
        name: [*u.get(name, ()), *v.get(name, ())] for name in {**u, **v}},
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"),
                    _strictest(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"),
                    _strictest(min)),
}  # fmt: skip


def _none(path: str, key: str | None = None) -> Any:
    if key is None:
        raise Nothing(path)
    raise ConfigError(f"{path} of the schema has several {key!r} at once: write them as one")


# -- what schemas say -----------------------------------------------------------------------


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _types(schema: Schema, path: str) -> list[str] | None:
    """The types that are written; where none is named, those that the keywords are about; None for
    any."""
    if "type" in schema:
        types = _listed(schema["type"])
        for name in types:
            if name not in NAMES and name != "any":
                raise ConfigError(f"{path} of the schema has the type {short(name)}")
        if "any" in types:
            return None
        return [t for t in types if not (t == "integer" and "number" in types)]
    return [name for name, keys in KEYWORDS.items() if keys & schema.keys()] or None


def _constants_of(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if found is None else list(found)


def _same(value: Any) -> str:
    """Equal for equal JSON values."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _kinds(schema: Schema) -> set[str] | None:
    """JSON types that may satisfy a schema; None where that is not said."""
    values = _constants_of(schema)
    if values is not None:
        return {*map(_kind, values)}
    if "type" not in schema or "any" in _listed(schema["type"]):
        return None
    return {"number" if kind == "integer" else kind for kind in _listed(schema["type"])}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    kinds = ("string", str), ("array", list), ("object", Mapping)
    return next(name for name, kind in kinds if isinstance(value, kind))


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a JSON type."""
    own = _kind(value)
    return kind in (own, "any") or (kind == "integer" and own == "number" and value == int(value))


def _patterns(schema: Schema) -> list[Any]:
    return _listed(schema["pattern"]) if "pattern" in schema else []


def _range(schema: Schema, low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for value in (least, most):
        if value is not None and not (
            _is(value, "number") and math.isfinite(value) and value == int(value) and value >= 0
        ):
            raise ConfigError(f"{path} of the schema has {low} or {high} that is no count")
    if most is not None and least > most:
        raise Nothing(path)
    return int(least), None if most is None else int(most)


def _bounds(schema: Schema, path: str) -> tuple[Any, Any, bool, bool]:
    """Least and largest number, and whether each is itself left out."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(above, bool):  # as before draft 6
        above = low if above else None
    if isinstance(below, bool):
        below = high if below else None
    for value in (low, high, above, below):
        if value is not None and not (_is(value, "number") and math.isfinite(value)):
            raise ConfigError(f"{path} of the schema has a bound that is no number")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    return above if open_low else low, below if open_high else high, open_low, open_high
