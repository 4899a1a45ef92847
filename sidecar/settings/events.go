package settings

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"strings"

	"lookaside/internal/bytesize"
	"lookaside/ipc/wire"
)

// EventsConfig configures the events that publish what the arena holds, in the form of vLLM's own
// events.
type EventsConfig struct {
	Endpoint       string // empty: not published
	Bind           string // auto, true or false
	ReplayEndpoint string // empty: not replayed
	TokenFile      string // empty: no token
	Topic          string // a template; see FillTopic
	Hashes         wire.KVHashes
	BufferSteps    int
	DPRank         uint32
	Journal        int64 // bytes; 0: there are no followers
}

// Binds reports whether the sidecar listens at the endpoint.
func (c *EventsConfig) Binds() bool {
	if c.Bind == "auto" {
		// this is vLLM's rule
		return strings.Contains(c.Endpoint, "*") || strings.Contains(c.Endpoint, "::") ||
			strings.HasPrefix(c.Endpoint, "ipc://")
	}
	return c.Bind == "true"
}

var eventsSettings = []Setting{
	{
		Key: "events.endpoint", Default: "",
		Unit:    "ZMQ endpoint, such as ipc:///run/x/events or tcp://127.0.0.1:5657",
		Meaning: "Where the sidecar publishes which pages the arena holds, in vLLM's format of KV events (docs/events.md). Unset: nothing is published.",
		set: checked(checkEventsEndpoint,
			func(c *Config) *string { return &c.Events.Endpoint }),
	},
	{
		Key: "events.bind", Default: "auto", Unit: "auto, true or false",
		Meaning: "Whether the sidecar listens at events.endpoint, or connects to a subscriber that listens there. auto: as vLLM does, it listens if the endpoint has a wildcard (tcp://*:5657) or is of ipc://.",
		set:     oneOf(func(c *Config) *string { return &c.Events.Bind }, "auto", "true", "false"),
	},
	{
		Key: "events.replay_endpoint", Default: "", Unit: "ZMQ endpoint",
		Meaning: "Where subscribers may ask for events again from a sequence number on; the sidecar binds it. Needs events.endpoint.",
		set: checked(checkEventsEndpoint,
			func(c *Config) *string { return &c.Events.ReplayEndpoint }),
	},
	{
		Key: "events.token_file", Default: "", Unit: "file",
		Meaning: "A file with the token that subscribers must send as the password of ZeroMQ's PLAIN mechanism, with any user name. It is asked for wherever the sidecar listens for subscribers. Unset: none is asked for, and a listening address that other machines can reach is warned about. PLAIN does not encrypt.",
		set:     text(func(c *Config) *string { return &c.Events.TokenFile }),
	},
	{
		Key: "events.topic", Default: "kv@{host}@{model}", Unit: "text",
		Meaning: "The topic of events. {model} and any other field of the space that the pages are of (lookaside status lists them), {fingerprint}, {host} and {rank} (events.data_parallel_rank) are filled in.",
		set:     checked(checkTopic, func(c *Config) *string { return &c.Events.Topic }),
	},
	{
		Key: "events.hashes", Default: "int", Unit: "int or bytes",
		Meaning: "How events name blocks: by the last 8 bytes of their hash as a number, vLLM's default, or by the whole hash, as vLLM does with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.",
		set: func(c *Config, v string) error {
			switch v {
			case "int":
				c.Events.Hashes = wire.KVHashInts
			case "bytes":
				c.Events.Hashes = wire.KVHashBytes
			default:
				return errors.New("want int or bytes")
			}
			return nil
		},
	},
	{
		Key: "events.buffer_steps", Default: "10000", Unit: "batches",
		Meaning: "How many batches are kept for events.replay_endpoint, within 64 MiB. A batch has up to 1,024 pages, and then some 10 or 36 KiB. vLLM's own events have the same setting. Fewer take less memory; who asks for a batch that is gone has everything published anew.",
		set:     whole(1, 1<<24, func(c *Config) *int { return &c.Events.BufferSteps }),
	},
	{
		Key: "events.data_parallel_rank", Default: "0", Unit: "rank",
		Meaning: "The data-parallel rank of the engine that the sidecar serves, which events carry.",
		set: func(c *Config, v string) error {
			n, err := parseInt(v, 0, 1<<20)
			c.Events.DPRank = uint32(n)
			return err
		},
	},
	{
		Key: "events.journal", Default: "16MiB", Unit: "size",
		Meaning: "How many bytes of changes are remembered for those that follow what the arena holds: events.endpoint, and schedulers whose engines publish KV events. Taken only while somebody follows; who falls behind by more is told everything anew. 0: nobody can follow.",
		set: func(c *Config, v string) (err error) {
			if v == "0" {
				c.Events.Journal = 0
				return nil
			}
			c.Events.Journal, err = bytesize.Parse(v)
			if err == nil && (c.Events.Journal < 512<<10 || c.Events.Journal > 1<<32) {
				err = errors.New("want 0, or 512KiB to 4GiB")
			}
			return err
		},
	},
}

var topicField = regexp.MustCompile(`\{[^{}]*\}`)

// FillTopic returns the topic with each {name} replaced by its value.
func (c *EventsConfig) FillTopic(value func(name string) string) string {
	return topicField.ReplaceAllStringFunc(c.Topic, func(m string) string {
		return value(m[1 : len(m)-1])
	})
}

func checkTopic(v string) error {
	if strings.ContainsAny(topicField.ReplaceAllString(v, ""), "{}") {
		return fmt.Errorf("%q has a brace without its other", v)
	}
	if len(v) > 512 {
		return errors.New("longer than 512 bytes")
	}
	return nil
}

func checkEventsEndpoint(v string) error {
	if path, ok := strings.CutPrefix(v, "ipc://"); ok && path != "" {
		return nil
	}
	if at, ok := strings.CutPrefix(v, "tcp://"); ok {
		_, _, err := net.SplitHostPort(at)
		return err
	}
	return fmt.Errorf("%q is neither tcp://HOST:PORT nor ipc://PATH", v)
}

// check refuses settings that need others which are missing.
func (c *EventsConfig) check() error {
	switch {
	case c.ReplayEndpoint != "" && c.Endpoint == "":
		return errors.New("events.replay_endpoint is set, but events.endpoint is not")
	case c.TokenFile != "" && c.ReplayEndpoint == "" && !c.Binds():
		return errors.New("events.token_file is set, and the sidecar listens for no subscriber: set events.endpoint, and events.bind to true if the endpoint has no wildcard")
	case c.Endpoint != "" && c.Journal == 0:
		return errors.New("events.endpoint is set, but events.journal is 0: there would be nothing to publish")
	}
	return nil
}
