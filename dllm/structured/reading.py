"""JSON schemas of real life: which texts are written for one, as parts of a regular language.

What is written is a part of what a schema allows: properties in their declared order and no
others, at most one blank behind a comma or a colon, numbers without an exponent, recursion and
values of any kind to a depth.  Annotations, unknown keywords and keywords of other types count for
nothing, as in the standard.  What cannot be kept is refused with its path.

A keyword that stands for other schemas is a method in `Reader.COMBINING`; two schemas that both
hold are one after `merged`, by keyword as `MERGE` says; types are functions in `Reader.TYPES`.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import permutations
from typing import Any, ClassVar
from urllib.parse import unquote

from ..core.errors import ConfigError, one_line, short
from . import values
from .byte_automaton import Empty, TooLarge, Unfit
from .expressions import regex_part
from .formats import ANNOTATIONS
from .keywords import (
    CHECKED,
    COMBINING,
    CONDITION,
    DEPENDENCIES,
    INNER,
    KEYWORDS,
    OPEN,
    REFUSED,
    Nothing,
    Schema,
    TooDeep,
    canonical,
    constants_of,
    isolated,
    kinds_of,
    rebased,
    types_of,
    without,
)
from .merging import MOST_PAIRS, merged
from .objects import record
from .parts import Bytes, Either, Leaf, Part, Repeat, Row, automaton_of
from .values import COLON, Base, listed

DEEPEST = 12  # arrays and objects within one another, in schemas that may not hold
MOST_PARTS = 20_000  # schemas that are read
REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')  # in JSON


def _named(schema: Any) -> set[str]:
    """Properties that an object declares or requires."""
    if not isinstance(schema, Mapping):
        return set()
    return {*schema.get("properties", ()), *schema.get("required", ())}


class Reader(Base):
    """Reads the parts of one schema."""

    def read(self) -> Part:
        """The texts of the schema.  Raises `ConfigError`, `Unfit`."""
        try:
            self.root = rebased(self.root)
            return self.value(self.root, "#")
        except (AttributeError, TypeError, LookupError, OverflowError, ValueError) as error:
            if isinstance(error, ConfigError | Unfit):
                raise
            raise ConfigError(f"the schema is not well formed: {one_line(error)}") from None

    def value(self, schema: Any, path: str) -> Part:
        self.parts += 1
        if self.parts > MOST_PARTS:
            raise TooLarge(f"has more than {MOST_PARTS:,} parts: allow less")
        self.budget.spend()
        if schema is True:
            return self.anything(self.budget.depth)
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
            except Empty:
                self._read[key] = schema, Nothing(path)
        found = self._read[key][1]
        if isinstance(found, Nothing):
            raise found
        return found

    def _value(self, given: Schema, path: str) -> Part:
        schema = {key: value for key, value in given.items() if self._counts(key)}
        tag = given.get("discriminator")
        if isinstance(tag, Mapping) and "propertyName" in tag and not self.testing:
            # By its value readers choose an alternative, whether or not the schema requires it.
            schema = merged(schema, {"required": [tag["propertyName"]]}, path)
        for key in sorted(REFUSED.keys() & schema.keys()):
            raise ConfigError(
                f"{path} of the schema has {key!r}, which is not supported: {REFUSED[key]}"
            )
        for key in ("enum", "prefixItems"):
            if not isinstance(schema.get(key, []), list):
                raise ConfigError(f"{path} of the schema has {key!r} that is no list")
        if self.testing:
            schema = isolated(schema, path)
        for key, combine in self.COMBINING.items():
            if key in schema:
                return combine(self, schema, path)
        if "const" in schema or "enum" in schema:
            return values.constants(self, schema, path)
        types = types_of(schema, path)
        if self.testing and types and "type" not in schema:
            types = [*KEYWORDS]
        if types is None:
            return self.anything(self.budget.depth)
        return self.either([partial(self.TYPES[name], self, schema, path) for name in types], path)

    def _counts(self, key: str) -> bool:
        """Whether a keyword says something about values."""
        if key in CHECKED:
            return True
        if key not in ANNOTATIONS and not key.startswith("x-"):
            self.ignored[str(key)] = None
        return False

    def anything(self, depth: int) -> Part:
        """Any JSON value, arrays and objects nested to a depth."""
        if self.testing:
            return self.nested()
        if depth not in self._any:
            self.budget.cut = self.repeats = True
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
        if not isinstance(name, str) or not name.startswith("#"):
            raise ConfigError(f"{path} of the schema refers to {short(name)}: keep it in one file")
        target: Any = self.root
        for key in name[1:].removeprefix("/").split("/") if name.strip("#/") else ():
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise ConfigError(f"{path} of the schema refers to {name}, which is not there")
        return target

    def _leads_back(self, name: str) -> bool:
        """Whether what a reference stands for contains the reference."""
        if name not in self._back:
            todo = [name]
            for each in todo:  # which grows
                with contextlib.suppress(ConfigError):
                    text = json.dumps(self.resolve(each, "#"))
                    self.budget.spend(len(text) // 16)
                    found = set(map(json.loads, REFERENCE.findall(text)))
                    todo += sorted(found.difference(todo[1:]))
            self._back[name] = name in todo[1:]
        return self._back[name]

    def all_of(self, parts: Sequence[Any], rest: Schema, path: str) -> Part:
        """What satisfies ``rest`` and all of ``parts``, whose references are followed."""
        opened = len(self.open)
        try:
            todo, schema, done = list(parts), dict(rest), set[str]()
            while todo:
                self.budget.spend()
                part = todo.pop(0)
                if isinstance(part, Mapping) and {"$ref", "allOf"} & part.keys():
                    part = isolated(part, path)
                if isinstance(part, tuple):  # all of what it names is there
                    done.update(part)
                elif isinstance(part, Mapping) and "$ref" in part:
                    name, more = part["$ref"], without(part, "$ref")
                    if "/draft-0" in str(self.root.get("$schema")):  # closes what it refers to
                        more.pop("additionalProperties", None)
                    target = self.resolve(name, path)
                    if name in done:
                        todo.insert(0, more)
                        continue
                    often = self.open.count(name) >= max(1, self.budget.depth)
                    if often and self._leads_back(name):
                        self.budget.cut = True
                        if self.testing:
                            self.refuse("$ref", path)
                        raise TooDeep(path)
                    self.open.append(name)
                    if not more and not todo and not schema:
                        return self.value(target, name)
                    todo[:0] = [target, (name,), more]
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

    def _any_of(self, schema: Schema, path: str) -> Part:
        key = "anyOf" if "anyOf" in schema else "oneOf"
        rest, parts = without(schema, key), list(schema[key])
        others = [list[Any]() for _ in parts]  # that may hold with each
        if key == "oneOf" and not self._all_different(parts, path):
            shared = {key: rest[key] for key in ("type", "required") if key in rest}
            known = [merged(shared, self.target(part, path), path) for part in parts]
            records = [self._record(each, path) for each in known]
            for i, j in permutations(range(len(parts)), 2):
                self.budget.spend(10)
                both = records if records[i] and records[j] else known
                if not self._disjoint(self._closed(both[i], rest), both[j], path):
                    others[i].append(schema[key][j])
            for i, record in enumerate(records):
                if record is not None and "type" not in known[i]:
                    parts[i] = {"allOf": [parts[i], {"type": "object"}]}

        def one(i: int) -> Part:
            where = f"{path}/{key}/{i}"
            part = self.all_of([parts[i]], rest, where) if rest else self.value(parts[i], where)
            return self.minus(part, others[i], path)

        return self.either([partial(one, i) for i in range(len(parts))], path)

    def _all_different(self, parts: Sequence[Any], path: str) -> bool:
        """Whether schemas are constants, no two of which are the same."""
        constant = [constants_of(self.target(part, path)) for part in parts]
        keys = [key for values in constant for key in {*map(canonical, values or ())}]
        return None not in constant and len({*keys}) == len(keys)

    def _record(self, schema: Any, path: str) -> Schema | None:
        """A schema that has no type and speaks of objects alone as one of objects, as which it is
        written."""
        if self.testing or schema is False or types_of(schema, path) != ["object"]:
            return None
        if kinds_of(schema) not in (None, {"object"}):
            return None
        record: Schema = merged(schema, {"type": "object"}, path)
        return record

    def _closed(self, schema: Any, rest: Schema) -> Any:
        """A schema that allows no more than is written for it beside the ``rest``: of an object
        that declares properties these alone."""
        names = _named(schema)
        if self.loose or not names or {"const", "enum", *INNER} & {*schema, *rest}:
            return schema
        own = dict.fromkeys(names | _named(rest), True) | schema.get("properties", {})
        return {**schema, "properties": own, "patternProperties": {}, "additionalProperties": False}

    def _not(self, schema: Schema, path: str) -> Part:
        return self.minus(self.value(without(schema, "not") or True, path), [schema["not"]], path)

    def minus(self, part: Part, schemas: Sequence[Any], path: str) -> Part:
        """What of a part satisfies none of the ``schemas``."""
        for schema in schemas:
            if self.loose and not self.testing:
                raise ConfigError(f"{path} of the schema has what may not hold, beside extra_keys")
            try:
                held = automaton_of(self.tester.value(schema, path), self.budget)
            except Nothing:
                continue
            found = automaton_of(part, self.budget)
            if self.testing:
                self.unsure |= self.tester.unsure
            else:
                if self.repeats and self.tester.unsure:
                    self.refuse("values of names that it does not declare", path)
                with contextlib.suppress(Empty):
                    self.combined(found, self.tester.nested().automaton, without=True)
                    self.refuse("what is nested deeply", path)
            try:
                part = Leaf(self.combined(found, held, without=True))
            except Empty:
                if self.tester.dropped is not None:
                    self.refuse(f"the format {self.tester.dropped!r}", path)
                raise
        return part

    @cached_property
    def tester(self) -> "Reader":
        reader = Reader(self.root, self.budget, testing=True)
        reader.wider = not self.wider  # more is taken away, but not from what is taken away
        return reader

    def target(self, schema: Any, path: str) -> Any:
        """The keywords of a schema, with those of what it refers to; empty for True."""
        for _ in range(8):
            if isinstance(schema, Mapping) and "$ref" in schema:
                schema = self.resolve(schema["$ref"], path)
            elif isinstance(schema, Mapping) and "allOf" in schema:
                parts, schema = schema["allOf"], without(schema, "allOf")
                for part in parts:
                    self.budget.spend(20)
                    schema = merged(schema, self.target(part, path), path)
        return {} if schema is True else schema

    def _disjoint(self, a: Any, b: Any, path: str, flat: bool = False) -> bool:
        """Whether no value satisfies both, as far as types, constants, names and bounds tell;
        ``flat``: without their alternatives, which may lead back."""
        a, b = self.target(a, path), self.target(b, path)
        if a is False or b is False:
            return True
        for one, other in () if flat else ((a, b), (b, a)):
            for key in {"anyOf", "oneOf"} & one.keys():
                if all(self._disjoint(each, other, path) for each in one[key]):
                    return True
        mine, other = constants_of(a), constants_of(b)
        if mine is not None and other is not None:
            return not {*map(canonical, mine)} & {*map(canonical, other)}
        kinds, others = kinds_of(a), kinds_of(b)
        if kinds is not None and others is not None and not kinds & others:
            return True
        if kinds == others == {"object"}:
            mine_, theirs = a.get("properties", {}), b.get("properties", {})
            required = {*a.get("required", ())}, {*b.get("required", ())}
            for one, names, needed in ((a, mine_, required[1]), (b, theirs, required[0])):
                if one.get("additionalProperties") is False and needed - {*names}:
                    return not one.get("patternProperties")
            both = required[0] & required[1] & {*mine_} & {*theirs}
            return any(self._disjoint(mine_[name], theirs[name], path, True) for name in both)
        return False

    def _dependencies(self, schema: Schema, path: str) -> Part:
        """Each property that asks for others: alternatives without it, and with them."""
        rest = {k: v for k, v in schema.items() if k not in DEPENDENCIES}
        asked = [
            (name, {"required": needs} if isinstance(needs, list) else needs)
            for key in DEPENDENCIES for name, needs in schema.get(key, {}).items()
        ]  # fmt: skip
        own = _named(rest)  # names that are written; any where there are none
        written = own.union(*(_named(more) for _, more in asked))
        hidden = any({*COMBINING, "if"} & {*more} for _, more in asked if isinstance(more, Mapping))
        alternatives: list[Any] = [rest]
        for name, more in asked:
            if not self.loose and own and not hidden and name not in written:
                continue  # it is not written
            without_: Any = {"properties": {name: False}}
            if not self.loose and not own:
                without_ = {"propertyNames": {"not": {"const": name}}}
            pair = [without_, merged({"required": [name]}, more, path)]
            alternatives = [merged(a, b, path) for a in alternatives for b in pair]
            if len(alternatives) > MOST_PAIRS:
                raise ConfigError(f"{path} of the schema has too many dependencies")
        return self.either([partial(self.value, each, path) for each in alternatives], path)

    def _if(self, schema: Schema, path: str) -> Part:
        rest = {key: value for key, value in schema.items() if key not in CONDITION}
        then, other = schema.get("then", True), schema.get("else", True)
        if then is True and other is True:
            return self.value(rest or True, path)
        return self.either([
            partial(self.all_of, [schema["if"], then], rest, path),
            lambda: self.minus(self.all_of([other], rest, path), [schema["if"]], path),
        ], path)  # fmt: skip

    COMBINING: ClassVar[dict[str, Callable[["Reader", Schema, str], Part]]] = {
        "$ref": lambda self, schema, path: self.all_of(
            [without(schema, OPEN)], {k: schema[k] for k in schema if k == OPEN}, path),
        "if": _if,
        "allOf": lambda self, schema, path: self.all_of(
            schema["allOf"], without(schema, "allOf"), path),
        "not": _not, "anyOf": _any_of, "oneOf": _any_of, "dependencies": _dependencies,
        "dependentRequired": _dependencies, "dependentSchemas": _dependencies,
    }  # fmt: skip
    TYPES: ClassVar[dict[str, Callable[["Reader", Schema, str], Part]]] = {
        "object": record, "array": values.array, "string": values.string,
        "number": values.number, "integer": partial(values.number, whole=True),
        "boolean": lambda *_: Either((Bytes(b"true"), Bytes(b"false"))),
        "null": lambda *_: Bytes(b"null"),
    }  # fmt: skip
