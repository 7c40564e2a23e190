"""The private and undocumented parts of Faust, mode and aiokafka that this project uses, as data.

What lives here: their names and why they are used. What must not: their use (delivery, worker, indexer_agent, kafka),
or an import of these packages.

Any release of these packages may move such a part without notice. Therefore pyproject.toml admits only the minor
versions in which all of them were found, and tests/unit/test_internals.py names each one that has moved. When it
passes with a new minor version, run all tests with that version before you raise the bound.
"""

from __future__ import annotations

from streams.process.internals import Internal

_DRIVER = "faust.transport.drivers.aiokafka"
_PROTOCOL = "aiokafka.coordinator.protocol"

_MESSAGE_FIELDS = ("topic", "partition", "offset", "timestamp", "timestamp_type", "headers", "key", "value", "checksum")
_MESSAGE_OPTIONS = (
    *("serialized_key_size", "serialized_value_size", "tp"),
    *("time_in", "time_out", "time_total", "generation_id"),
)

#: How records reach the agent together (streams/kafka/delivery.py).
_DELIVERY = (
    Internal(_DRIVER, "Transport.Consumer", "overridden: our consumer takes the place of Faust's"),
    Internal("faust", "App._new_transport", "overridden: our transport takes the place of Faust's", ()),
    Internal("faust.types.settings", "Settings.broker_consumer", "the address that Faust's own _new_transport uses"),
    Internal(_DRIVER, "Consumer._new_consumer_thread", "overridden: our thread takes the place of Faust's", ()),
    Internal(_DRIVER, "Consumer._thread", "seeks and refreshes of topics run on this thread"),
    Internal(_DRIVER, "Consumer.loop", "what the thread's constructor needs"),
    Internal(_DRIVER, "Consumer.beacon", "what the thread's constructor needs"),
    Internal(_DRIVER, "AIOKafkaConsumerThread.call_thread", "runs a call on the thread", ("fun", "args", "kwargs")),
    Internal(_DRIVER, "AIOKafkaConsumerThread.seek", "seeks on the thread", ("partition", "offset")),
    Internal(_DRIVER, "AIOKafkaConsumerThread._ensure_consumer", "the thread's aiokafka consumer", ()),
    Internal(
        _DRIVER,
        "AIOKafkaConsumerThread._create_worker_consumer",
        "overridden: its consumer reads committed records only",
        ("transport",),
    ),
    Internal("aiokafka", "AIOKafkaConsumer._isolation_level", "set to read_committed before the consumer starts"),
    Internal("aiokafka", "AIOKafkaConsumer._client", "the client that knows the topics"),
    Internal("aiokafka.client", "AIOKafkaClient.force_metadata_update", "finds new topics at once", ()),
    Internal(
        _DRIVER, "Consumer.getmany", "overridden: yields one message for all the records of a fetch", ("timeout",)
    ),
    Internal(_DRIVER, "Consumer._wait_next_records", "fetches, as Faust's own getmany does", ("timeout",)),
    Internal(_DRIVER, "Consumer.flow_active", "whether Faust wants records, as in its own getmany"),
    Internal(_DRIVER, "Consumer.should_stop", "whether the consumer ends, as in Faust's own getmany"),
    Internal(_DRIVER, "Consumer._buffered_partitions", "partitions to deliver, as in Faust's own getmany"),
    Internal(_DRIVER, "Consumer.app", "the App whose assignment, monitor and topics are used"),
    Internal("faust", "App.consumer_generation_id", "whether records belong to an assignment that has ended"),
    Internal("faust", "App.monitor", "where Faust's own getmany notes the end of a partition"),
    Internal(
        "faust.sensors.monitor", "Monitor.track_tp_end_offset", "what Faust's own getmany calls", ("tp", "offset")
    ),
    Internal("faust", "App.topics", "knows whether a topic is acknowledged"),
    Internal("faust.transport.conductor", "Conductor.acks_enabled_for", "whether to acknowledge", ("topic",)),
    Internal(_DRIVER, "Consumer._read_offset", "where a partition is read to; Faust looks for gaps after it"),
    Internal(_DRIVER, "Consumer._add_gap", "acknowledges offsets without a record", ("tp", "offset_from", "offset_to")),
    Internal(_DRIVER, "Consumer._committed_offset", "older offsets are not acknowledged again"),
    Internal(_DRIVER, "Consumer._acked_index", "the set of acknowledged offsets"),
    Internal(_DRIVER, "Consumer._acked", "the list of acknowledged offsets, from which Faust commits"),
    Internal(_DRIVER, "Consumer._n_acked", "the number of acknowledged offsets; Faust commits after many"),
    Internal(_DRIVER, "Consumer.ack", "acknowledges the last offset of a message", ("message",)),
    Internal(
        "faust.types.tuples",
        "ack_lock",
        "held by Faust when it calls on_final_ack, which changes the sets above; 0.13 has no such lock",
    ),
    Internal(
        "faust.types.tuples",
        "ConsumerMessage.on_final_ack",
        "overridden: acknowledges all the offsets of a message",
        ("consumer",),
    ),
    Internal(
        "faust.types.tuples",
        "ConsumerMessage.__init__",
        "our messages are made by position",
        (*_MESSAGE_FIELDS, *_MESSAGE_OPTIONS),
    ),
    Internal(_DRIVER, "Consumer.perform_seek", "overridden: partitions may be revoked meanwhile", ()),
    Internal(_DRIVER, "Consumer.seek_to_committed", "what perform_seek calls, and our test replaces", ()),
    Internal(_DRIVER, "Consumer._seek", "overridden: seeks on the consumer's thread", ("partition", "offset")),
    Internal(_DRIVER, "Consumer.on_stop", "overridden: has a limit, without which it waits for a dead Kafka", ()),
    Internal(_DRIVER, "AIOKafkaConsumerThread.on_thread_stop", "overridden: has a limit as well", ()),
    Internal("mode.services", "Service.wait_first", "overridden: no task for what ends at once", ("coros", "timeout")),
    Internal("mode.services", "WaitResults", "what wait_first returns", ("done", "results", "stopped")),
)

#: How the agent moves its partitions (streams/indexer_agent.py).
_AGENT = (
    Internal("faust", "App.consumer", "the consumer, which is ours"),
    Internal(_DRIVER, "Consumer.seek_wait", "seeks a source to its table's offset", ("partitions",)),
    Internal(_DRIVER, "Consumer.pause_partitions", "pauses sources whose queue is full", ("tps",)),
    Internal(_DRIVER, "Consumer.resume_partitions", "resumes them", ("tps",)),
    Internal(_DRIVER, "Consumer.highwater", "where a source ends", ("tp",)),
    Internal(_DRIVER, "Consumer.topic_partitions", "whether the consumer knows a topic", ("topic",)),
    Internal("faust", "App.assignor", "Faust's assignor"),
    Internal(
        "faust.assignor.partition_assignor",
        "PartitionAssignor.assigned_standbys",
        "the partitions that this worker follows",
        (),
    ),
)

#: How the App starts, and what it leaves out (streams/worker.py, streams/kafka/delivery.py).
_START = (
    Internal("faust.types.settings", "Settings.Worker", "the setting through which our Worker is used"),
    Internal("faust", "Worker.execute_from_commandline", "overridden: prepares before Faust starts", ()),
    Internal("faust", "Worker.loop", "the loop on which it prepares"),
    Internal("faust", "Worker.app", "the App that it prepares"),
    Internal("faust", "App.BootStrategy", "overridden: ours has no web pages"),
    Internal("faust", "App.BootStrategy.enable_web", "overridden: Faust's own web pages are off"),
    Internal("faust.types.settings", "Settings.Topic", "the setting through which our Topic is used"),
    Internal("faust", "Topic.get_topic_name", "overridden: a topic of ours consists of several", ()),
    Internal("faust", "Topic.topics", "their names"),
    Internal(_DRIVER, "Consumer.stop", "leaves the group before Faust stops", ()),
)

#: What Kafka's protocols define and no public function of a client computes (streams/kafka/clients.py).
_KAFKA = (
    Internal("aiokafka.partitioner", "murmur2", "the partition of a key, as in Faust and Java", ("data",)),
    Internal(_PROTOCOL, "ConsumerProtocolMemberAssignment.decode", "what the group assigned to a member", ("data",)),
    Internal(_PROTOCOL, "ConsumerProtocolMemberAssignment.partitions", "its partitions", ()),
)

#: Tokens for Faust's clients (streams/security/faust_credentials.py).
_CREDENTIALS = (
    Internal("aiokafka.abc", "AbstractTokenProvider", "the base class of what gives tokens"),
    Internal("aiokafka.abc", "AbstractTokenProvider.token", "overridden: called for each connection", ()),
)

INTERNALS: tuple[Internal, ...] = (*_DELIVERY, *_AGENT, *_START, *_KAFKA, *_CREDENTIALS)
