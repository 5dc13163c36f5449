from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Images(_message.Message):
    __slots__ = ("kind", "shape", "values", "files")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[Images.Kind]
        UINT8: _ClassVar[Images.Kind]
        FLOAT32: _ClassVar[Images.Kind]
        ENCODED: _ClassVar[Images.Kind]
    UNSPECIFIED: Images.Kind
    UINT8: Images.Kind
    FLOAT32: Images.Kind
    ENCODED: Images.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    kind: Images.Kind
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    files: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, kind: _Optional[_Union[Images.Kind, str]] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ..., files: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("id", "images")
    ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: str
    images: Images
    def __init__(self, id: _Optional[str] = ..., images: _Optional[_Union[Images, _Mapping]] = ...) -> None: ...

class PredictReply(_message.Message):
    __slots__ = ("id", "samples", "classes", "probabilities", "weights", "model_version", "adapted", "position", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    samples: int
    classes: int
    probabilities: bytes
    weights: bytes
    model_version: str
    adapted: bool
    position: int
    error: str
    def __init__(self, id: _Optional[str] = ..., samples: _Optional[int] = ..., classes: _Optional[int] = ..., probabilities: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., model_version: _Optional[str] = ..., adapted: bool = ..., position: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("model_version", "adapter", "classes", "samples", "unsaved_samples", "waiting", "holding", "guard_events", "snapshots", "notes", "uptime_seconds", "training", "shape", "candidate", "refused", "data_samples", "data_skipped", "data_notes", "estimated_accuracy", "choice", "choice_reason")
    class GuardEventsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNSAVED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    GUARD_EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DATA_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    DATA_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    DATA_NOTES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_REASON_FIELD_NUMBER: _ClassVar[int]
    model_version: str
    adapter: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    samples: int
    unsaved_samples: int
    waiting: int
    holding: bool
    guard_events: _containers.ScalarMap[str, int]
    snapshots: _containers.RepeatedScalarFieldContainer[str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    uptime_seconds: float
    training: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    candidate: str
    refused: str
    data_samples: int
    data_skipped: int
    data_notes: _containers.RepeatedScalarFieldContainer[str]
    estimated_accuracy: _containers.RepeatedScalarFieldContainer[float]
    choice: str
    choice_reason: str
    def __init__(self, model_version: _Optional[str] = ..., adapter: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., samples: _Optional[int] = ..., unsaved_samples: _Optional[int] = ..., waiting: _Optional[int] = ..., holding: bool = ..., guard_events: _Optional[_Mapping[str, int]] = ..., snapshots: _Optional[_Iterable[str]] = ..., notes: _Optional[_Iterable[str]] = ..., uptime_seconds: _Optional[float] = ..., training: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., candidate: _Optional[str] = ..., refused: _Optional[str] = ..., data_samples: _Optional[int] = ..., data_skipped: _Optional[int] = ..., data_notes: _Optional[_Iterable[str]] = ..., estimated_accuracy: _Optional[_Iterable[float]] = ..., choice: _Optional[str] = ..., choice_reason: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("version", "state", "origin", "time", "reason", "check", "snapshots")
    class CheckEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    version: str
    state: str
    origin: str
    time: float
    reason: str
    check: _containers.ScalarMap[str, float]
    snapshots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., state: _Optional[str] = ..., origin: _Optional[str] = ..., time: _Optional[float] = ..., reason: _Optional[str] = ..., check: _Optional[_Mapping[str, float]] = ..., snapshots: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: str
    def __init__(self, version: _Optional[str] = ...) -> None: ...

class ModelReply(_message.Message):
    __slots__ = ("version", "state", "samples")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    version: str
    state: str
    samples: int
    def __init__(self, version: _Optional[str] = ..., state: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class RescanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RescanReply(_message.Message):
    __slots__ = ("samples", "used", "skipped", "notes")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    used: int
    skipped: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, samples: _Optional[int] = ..., used: _Optional[int] = ..., skipped: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("snapshot", "model_version", "samples")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    model_version: str
    samples: int
    def __init__(self, snapshot: _Optional[str] = ..., model_version: _Optional[str] = ..., samples: _Optional[int] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: str
    def __init__(self, snapshot: _Optional[str] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamedArray(_message.Message):
    __slots__ = ("name", "dtype", "shape", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("arrays",)
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    arrays: _containers.RepeatedCompositeFieldContainer[NamedArray]
    def __init__(self, arrays: _Optional[_Iterable[_Union[NamedArray, _Mapping]]] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("phase", "config_json", "records", "name")
    class RecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Record
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...
    PHASE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    phase: str
    config_json: str
    records: _containers.MessageMap[str, Record]
    name: str
    def __init__(self, phase: _Optional[str] = ..., config_json: _Optional[str] = ..., records: _Optional[_Mapping[str, Record]] = ..., name: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("records", "metrics_json", "identity_json")
    class RecordsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Record
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Record, _Mapping]] = ...) -> None: ...
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_JSON_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_JSON_FIELD_NUMBER: _ClassVar[int]
    records: _containers.MessageMap[str, Record]
    metrics_json: str
    identity_json: str
    def __init__(self, records: _Optional[_Mapping[str, Record]] = ..., metrics_json: _Optional[str] = ..., identity_json: _Optional[str] = ...) -> None: ...
