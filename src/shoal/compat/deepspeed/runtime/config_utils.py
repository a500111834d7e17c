"""The base of published configuration sections, and functions that read one value of a dict."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, field_serializer

from shoal.compat.deepspeed.utils.logging import logger

__all__ = ["DeepSpeedConfigModel", "DeepSpeedConfigObject", "ScientificNotationEncoder",
           "dict_raise_error_on_duplicate_keys", "get_config_default", "get_dict_param", "get_list_param",
           "get_scalar_param", "pp_int"]


class DeepSpeedConfigModel(BaseModel):
    """One object of the published JSON. A value "auto" stands for the default, unless `strict`.

    A field with `json_schema_extra={"deprecated": True, "new_param": NAME}` is an old spelling: its value goes to the
    field NAME, changed by `new_param_fn` if there is one. `set_new_param: False` only warns.
    """

    model_config = ConfigDict(validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True,
                              extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    def __init__(self, strict: bool = False, **data: Any):
        super().__init__(**(data if strict else {key: value for key, value in data.items() if value != "auto"}))
        for name, field in type(self).model_fields.items():
            rule = field.json_schema_extra
            if isinstance(rule, dict) and rule.get("deprecated") and name in self.model_fields_set:
                self._replace_old(name, rule)

    def _replace_old(self, name: str, rule: dict[str, Any]) -> None:
        new = str(rule.get("new_param") or "")
        logger.warning("%s: '%s' is an old spelling%s %s", type(self).__name__, name,
                       f"; write '{new}'" if new else "", rule.get("deprecated_msg") or "")
        if not new or not rule.get("set_new_param", True):
            return
        owner: Any = self
        *path, last = new.split(".")
        for part in path:
            owner = getattr(owner, part)
        assert last not in owner.model_fields_set, (
            f"{type(self).__name__}: got both '{name}' and '{new}', two spellings of one key; keep '{new}'")
        value = getattr(self, name)
        convert = rule.get("new_param_fn")
        setattr(owner, last, value if convert is None else convert(value))

    @field_serializer("dtype", check_fields=False)
    def serialize_torch_dtype(dtype: Any) -> str:
        """Return a torch dtype as text."""
        return str(dtype)


def get_config_default(config: type[BaseModel], field_name: str) -> Any:
    """Return the default of a field; raises `AssertionError` for an unknown or a required field."""
    assert field_name in config.model_fields, f"{config.__name__} has no field '{field_name}'"
    assert not config.model_fields[field_name].is_required(), f"{config.__name__}.{field_name} has no default"
    return config.model_fields[field_name].get_default(call_default_factory=True)


class pp_int(int):
    """A whole number that prints with a comma after each three digits, or as the given text."""

    custom_print_str: str | None

    def __new__(cls, val: int, custom_print_str: str | None = None) -> pp_int:
        self = super().__new__(cls, val)
        self.custom_print_str = custom_print_str
        return self

    def __repr__(self) -> str:
        return self.custom_print_str or f"{int(self):,}"

    __str__ = __repr__


class ScientificNotationEncoder(json.JSONEncoder):
    """Writes whole numbers of more than three digits, and floats, in scientific notation."""

    def iterencode(self, o: Any, _one_shot: bool = False, level: int = 0) -> Iterator[str]:
        indent = self.indent if isinstance(self.indent, int) else 4
        match o:
            case bool():
                return iter(["true" if o else "false"])
            case float() | int() if o > 1e3:
                return iter([f"{o:e}"])
            case dict():
                inner = " " * (level + indent)
                rows = [f'\n{inner}"{key}": {"".join(self.iterencode(value, level=level + indent))}'
                        for key, value in o.items()]
                return iter(["{" + ", ".join(rows) + "\n" + " " * level + "}"])
            case list():
                return iter(["[" + ", ".join("".join(self.iterencode(each)) for each in o) + "]"])
            case _:
                return iter([", ".join(super().iterencode(o, _one_shot))])


class DeepSpeedConfigObject:
    """A section whose attributes are its keys."""

    def repr(self) -> dict[str, Any]:
        """Return the attributes."""
        return vars(self)

    def __repr__(self) -> str:
        return json.dumps(vars(self), sort_keys=False, indent=4, cls=ScientificNotationEncoder, default=str)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a value of `param_dict`, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of one JSON object as a dict; raises `ValueError` for a key that occurs twice."""
    found = dict(ordered_pairs)
    if len(found) != len(ordered_pairs):
        keys = [key for key, _ in ordered_pairs]
        raise ValueError(f"the configuration has duplicate keys: {sorted({key for key in keys if keys.count(key) > 1})}; "
                         f"keep one of each")
    return found
