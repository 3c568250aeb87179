from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LinkStreamKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINK_STREAM_KIND_UNSPECIFIED: _ClassVar[LinkStreamKind]
    LINK_STREAM_KIND_STEPS: _ClassVar[LinkStreamKind]
    LINK_STREAM_KIND_MASKS: _ClassVar[LinkStreamKind]
LINK_STREAM_KIND_UNSPECIFIED: LinkStreamKind
LINK_STREAM_KIND_STEPS: LinkStreamKind
LINK_STREAM_KIND_MASKS: LinkStreamKind

class LinkMessage(_message.Message):
    __slots__ = ("open", "accept", "reject", "parts", "consumed", "goodbye")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    open: LinkOpen
    accept: LinkAccept
    reject: str
    parts: _containers.RepeatedCompositeFieldContainer[LinkPart]
    consumed: _containers.RepeatedCompositeFieldContainer[LinkConsumed]
    goodbye: str
    def __init__(self, open: _Optional[_Union[LinkOpen, _Mapping]] = ..., accept: _Optional[_Union[LinkAccept, _Mapping]] = ..., reject: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[LinkPart, _Mapping]]] = ..., consumed: _Optional[_Iterable[_Union[LinkConsumed, _Mapping]]] = ..., goodbye: _Optional[str] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("version", "hello")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    version: int
    hello: bytes
    def __init__(self, version: _Optional[int] = ..., hello: _Optional[bytes] = ...) -> None: ...

class LinkAccept(_message.Message):
    __slots__ = ("reply", "heartbeat_interval_s", "heartbeat_timeout_s", "plan", "result", "mask")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    reply: bytes
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    plan: LinkStream
    result: LinkStream
    mask: LinkStream
    def __init__(self, reply: _Optional[bytes] = ..., heartbeat_interval_s: _Optional[float] = ..., heartbeat_timeout_s: _Optional[float] = ..., plan: _Optional[_Union[LinkStream, _Mapping]] = ..., result: _Optional[_Union[LinkStream, _Mapping]] = ..., mask: _Optional[_Union[LinkStream, _Mapping]] = ...) -> None: ...

class LinkStream(_message.Message):
    __slots__ = ("window", "max_frame")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_FIELD_NUMBER: _ClassVar[int]
    window: int
    max_frame: int
    def __init__(self, window: _Optional[int] = ..., max_frame: _Optional[int] = ...) -> None: ...

class LinkPart(_message.Message):
    __slots__ = ("stream", "data", "rest")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    stream: LinkStreamKind
    data: bytes
    rest: int
    def __init__(self, stream: _Optional[_Union[LinkStreamKind, str]] = ..., data: _Optional[bytes] = ..., rest: _Optional[int] = ...) -> None: ...

class LinkConsumed(_message.Message):
    __slots__ = ("stream", "bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: LinkStreamKind
    bytes: int
    def __init__(self, stream: _Optional[_Union[LinkStreamKind, str]] = ..., bytes: _Optional[int] = ...) -> None: ...
