"""Shapes of rows and predictions: pydantic models made from what is served, and through them the OpenAPI schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from dapcal.serve import served as given

EXACT = ConfigDict(extra="forbid")
STRICT = ConfigDict(strict=True, extra="forbid")  # "1" is not a number, true neither
OPEN = ConfigDict(strict=True, extra="allow")  # a row may carry an id, the target or more

SHOWN = 50  # levels of a category


def _text(value: str) -> str:
    """Refuse half a character, which an escape in JSON can stand for and no table can hold."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text holds half a surrogate pair, which is not a character") from error
    return value


Number = Annotated[float, Field(allow_inf_nan=False, json_schema_extra={"format": "double"})]
Text = Annotated[str, AfterValidator(_text)]
Value = Annotated[float | None, Field(description="null where the arithmetic overflows, at rows far too far out")]


class Shapes(NamedTuple):
    """Models of requests and answers."""

    row: type[BaseModel]
    rows: type[BaseModel]
    prediction: type[Judged]
    answer: type[Judged]  # a prediction with notes
    predictions: type[BaseModel]


class Judged(BaseModel):
    """A prediction, and how far it can be trusted."""

    model_config = EXACT
    prediction: Any
    epistemic: Value = Field(title="Uncertainty from missing data")
    aleatoric: Value = Field(title="Uncertainty that more data would not remove")
    distance: Value = Field(title="Calibrated distance from the training data, 0 close to it")
    ood_p_value: Value = Field(title="Conformal p-value of being in distribution")
    ood: bool = Field(title="Whether the row is out of distribution")
    reason: str = Field("", title="Why it is, such as “ambiguous” or “far from the training data”; empty where not")
    missing: list[str] = Field([], title="Columns of a table without a value in this row")
    unusual: dict[str, str] = Field({}, title="Columns behind the flag, and what is unusual about them")


class Interval(BaseModel):
    """A central interval that holds the target with probability `level`."""

    model_config = EXACT
    lower: Value
    upper: Value
    level: float


class Ready(BaseModel):
    """That a request for predictions would be taken now."""

    ready: bool


class Health(BaseModel):
    """That the service runs, and what it serves."""

    ready: bool
    model: str
    task: given.Task
    version: str
    uptime_seconds: float


class Pointers(BaseModel):
    """Where to go from here."""

    model: str
    docs: str
    openapi: str
    health: str
    ready: str
    metrics: str


def shapes(served: given.Served, limits: given.Limits) -> Shapes:
    """Models of rows and predictions, single and in batches.

    >>> served = given.Served("m", "regression", (given.Field("class", "number"),), (), lambda rows: [])
    >>> shapes(served, given.Limits()).row.model_validate({"class": 1.5}).model_dump(by_alias=True)
    {'class': 1.5}
    """
    about = "A value for every column, null where it is not known; other fields are ignored, with a note."
    row = _named("Row", about, {field.name: _column(field) for field in served.fields}, OPEN)
    several = (list[row], Field(min_length=1, max_length=limits.rows))  # type: ignore[valid-type]
    if served.task == "regression":
        own: dict[str, Any] = {"prediction": (Value, ...), "interval": (Interval, ...)}
    else:
        about = "The probability of every class."
        probabilities = _named("Probabilities", about, {name: (Value, Field()) for name in served.classes}, EXACT)
        own = {"prediction": (Literal[served.classes], ...), "probabilities": (probabilities, ...)}
    prediction = create_model("Prediction", __base__=Judged, __doc__=Judged.__doc__, **own)
    several_out = list[prediction]  # type: ignore[valid-type]
    notes = (list[str], Field(title="Values that were missing, fields that were ignored: what predict prints"))
    return Shapes(
        row=row,
        rows=create_model("Rows", __config__=STRICT, rows=several),
        prediction=prediction,
        answer=create_model("Answer", __base__=prediction, __doc__="A prediction, with notes.", notes=notes),
        predictions=create_model("Predictions", __config__=EXACT, predictions=(several_out, ...), notes=notes),
    )


def _named(name: str, about: str, columns: dict[str, tuple[Any, Any]], config: ConfigDict) -> type[BaseModel]:
    """A model of columns with any names, name -> (type, field).

    Attributes are numbered and names are aliases: a column can be called "class", "_id", "model_config" or nothing.
    """
    attributes: dict[str, Any] = {}
    for number, (column, (kind, field)) in enumerate(columns.items()):
        attributes[f"column_{number}"] = (Annotated[kind, Field(alias=column, title=column)], field)
    return create_model(name, __config__=config, __doc__=about, **attributes)


def _column(field: given.Field) -> tuple[Any, Any]:
    """Type and field of one column."""
    kind: Any = Text if field.kind == "category" else Number
    if field.words is not None:
        kind = _or_boolean(kind, field.words)
    if field.bounds is not None:
        kind = Annotated[kind, Field(ge=field.bounds[0], le=field.bounds[1])]
    for length in reversed(field.shape):
        kind = Annotated[list[kind], Field(min_length=length, max_length=length)]
    default = ... if field.required else None
    return kind if field.required and not field.nullable else kind | None, Field(default, **_about(field.levels))


def _or_boolean(text: Any, words: tuple[str, str]) -> Any:
    """A text, or true or false in its place."""

    def spelt(value: Any) -> Any:
        return words[value] if isinstance(value, bool) else value

    return Annotated[text, BeforeValidator(spelt, json_schema_input_type=bool | str)]


def _about(levels: tuple[str, ...]) -> dict[str, Any]:
    """What the schema says of a category: the levels are examples, since others are accepted."""
    if not levels:
        return {}
    count = f"{len(levels)} values were seen in training, " + ("such as these" if len(levels) > SHOWN else "these")
    return {"description": f"{count}; others are accepted, as unknown ones.", "examples": list(levels[:SHOWN])}
