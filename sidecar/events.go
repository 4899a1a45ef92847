package sidecar

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
	"lookaside/tiers"
	"lookaside/tiers/engine"
)

// mediumArena is vLLM's name for host memory.
const mediumArena = "CPU"

const (
	// eventPages is about the number of pages of one read of the journal, and the most of a batch.
	eventPages = 1024
	// unknownPatience is how often the publisher checks whether undeclared spaces were declared.
	unknownPatience = time.Second
	// eventQueue is how many batches wait for a subscriber that does not read before it loses the
	// oldest: at least the changes of 10 s. They count for the 64 MiB of events.buffer_steps.
	eventQueue = 1000
	// eventInterval is how long changes are collected into one batch. A router that learns of a
	// page 10 ms late loses nothing, since a prefill takes longer. Batches of single pages would
	// cost subscribers more than the pages.
	eventInterval = 10 * time.Millisecond
)

// events publishes what the arena holds.
type events struct {
	pub  *ipc.EventPublisher
	feed *engine.Feed
	src  *eventSource
}

// eventSource turns the events of a feed into batches of vLLM's events, each with one topic. The
// publisher's goroutine owns all fields except unknown.
type eventSource struct {
	cfg    settings.EventsConfig
	feed   *engine.Feed
	fields func(tiers.Fingerprint) (map[string]string, bool)
	now    func() time.Time
	log    *zap.Logger

	unknown atomic.Bool // pages of undeclared spaces were skipped
	topics  map[string]bool
	of      map[tiers.Fingerprint]string
	buf     []byte
	events  []engine.Event
	queue   []topicBatch
	ended   bool
	payload []byte
}

// topicBatch holds the events of one topic that are sent together.
type topicBatch struct {
	topic   string
	n       int
	encoded []byte
}

// newEvents follows the engine and opens the sockets.
func newEvents(cfg settings.EventsConfig, e *engine.Engine,
	fields func(tiers.Fingerprint) (map[string]string, bool),
	log *zap.Logger) (_ *events, err error) {
	feed, err := e.Follow(0)
	if err != nil {
		return nil, fmt.Errorf("events: %w", err)
	}
	defer func() {
		if err != nil {
			feed.Close()
		}
	}()
	src := &eventSource{cfg: cfg, feed: feed, fields: fields, now: time.Now, log: log,
		topics: map[string]bool{}, of: map[tiers.Fingerprint]string{}}
	token, err := settings.ReadToken("events.token_file", cfg.TokenFile, log)
	if err != nil {
		return nil, err
	}
	pub, err := ipc.NewEventPublisher(ipc.EventOptions{
		Endpoint: cfg.Endpoint, Bind: cfg.Binds(), ReplayEndpoint: cfg.ReplayEndpoint, Token: token,
		BufferSteps: cfg.BufferSteps, HWM: eventQueue, Log: log,
	}, src)
	if err != nil {
		return nil, err
	}
	at, replay := pub.Endpoints()
	if token == "" {
		warnOpen(log, "events.endpoint", at, cfg.Binds())
		warnOpen(log, "events.replay_endpoint", replay, true)
	}
	log.Info("publishing KV events", zap.String("endpoint", at), zap.String("replay_endpoint",
		replay), zap.String("topic", cfg.Topic))
	return &events{pub: pub, feed: feed, src: src}, nil
}

// warnOpen warns about an endpoint that strangers can reach.
func warnOpen(log *zap.Logger, setting, endpoint string, bound bool) {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	if at, err := netip.ParseAddrPort(address); !bound || !isTCP ||
		err == nil && at.Addr().Unmap().IsLoopback() {
		return
	}
	log.Warn("KV events can be read from other machines, without a token; set events.token_file, or bind a loopback address or ipc://",
		zap.String("setting", setting), zap.String("endpoint", endpoint))
}

// run wakes the publisher when there are events, until ctx is done.
func (ev *events) run(ctx context.Context) {
	tick := time.NewTicker(unknownPatience)
	defer tick.Stop()
	ev.pub.Wake()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if !ev.src.unknown.Swap(false) {
				continue
			}
			// publishes them if they are declared now; otherwise they are skipped again
			ev.feed.Restart()
		case <-ev.feed.Ready():
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(eventInterval):
		}
		ev.pub.Wake()
	}
}

// Stats implements admin.Events.
func (ev *events) Stats() ipc.EventStats { return ev.pub.Stats() }

// Gaps implements admin.Events.
func (ev *events) Gaps() uint64 { return ev.feed.Gaps() }

func (ev *events) close() error {
	err := ev.pub.Close()
	ev.feed.Close()
	return err
}

// Resync implements ipc.EventSource.
func (s *eventSource) Resync() { s.feed.Restart() }

// NextBatch implements ipc.EventSource.
func (s *eventSource) NextBatch() (topic string, payload []byte, ok bool) {
	for len(s.queue) == 0 {
		b, buf, err := s.feed.Next(eventPages, s.buf, s.events[:0])
		s.buf, s.events = buf, b.Events
		if err != nil {
			if !errors.Is(err, tiers.ErrClosed) {
				s.log.Error("events", zap.Error(err))
			}
			return "", nil, false
		}
		if b.Reset {
			for _, topic := range slices.Sorted(maps.Keys(s.topics)) {
				s.add(topic, 1, wire.AppendAllBlocksCleared(nil))
			}
		}
		s.encode(b.Events)
		if len(s.queue) == 0 && !b.More {
			return "", nil, false
		}
	}
	return s.pop()
}

func (s *eventSource) pop() (string, []byte, bool) {
	b := s.queue[0]
	s.queue = s.queue[1:]
	s.payload = wire.AppendKVEventBatch(s.payload[:0], float64(s.now().UnixNano())/1e9, b.n,
		b.encoded, s.cfg.DPRank)
	return b.topic, s.payload, true
}

// LastBatch implements ipc.EventSource. After it nothing can be found here.
func (s *eventSource) LastBatch() (topic string, payload []byte, ok bool) {
	if !s.ended {
		s.ended = true
		s.queue = nil
		for _, topic := range slices.Sorted(maps.Keys(s.topics)) {
			s.add(topic, 1, wire.AppendAllBlocksCleared(nil))
		}
	}
	if len(s.queue) == 0 {
		return "", nil, false
	}
	return s.pop()
}

// add puts encoded events into the pending batch of their topic.
func (s *eventSource) add(topic string, n int, encoded []byte) {
	for i := range s.queue {
		if s.queue[i].topic == topic {
			s.queue[i].n += n
			s.queue[i].encoded = append(s.queue[i].encoded, encoded...)
			return
		}
	}
	s.queue = append(s.queue, topicBatch{topic, n, encoded})
}

// encode turns events into vLLM's. Stored pages that continue those of the event before are merged
// with them; so are removed pages.
func (s *eventSource) encode(events []engine.Event) {
	for i := 0; i < len(events); {
		ev := events[i]
		hashes, d := ev.Hashes, ev.Space.Geometry.DigestBytes
		for i++; i < len(events) && events[i].Space == ev.Space && events[i].Kind == ev.Kind; i++ {
			if next := &events[i]; ev.Kind == engine.PagesStored && (len(next.Prev) == 0 ||
				string(next.Prev) != string(hashes[len(hashes)-d:])) {
				break
			}
			hashes = append(hashes[:len(hashes):len(hashes)], events[i].Hashes...)
		}
		topic, ok := s.topic(ev.Space)
		if !ok {
			s.unknown.Store(true)
			continue
		}
		n := 1
		var b []byte
		if !s.topics[topic] {
			// Subscribers may drop what they know of an earlier sidecar.
			s.topics[topic] = true
			b, n = wire.AppendAllBlocksCleared(b), 2
		}
		if ev.Kind == engine.PagesStored {
			b = (&wire.BlockStored{Hashes: hashes, Parent: ev.Prev, DigestBytes: d,
				BlockTokens: ev.Space.Geometry.PageTokens, Medium: mediumArena}).Append(b,
				s.cfg.Hashes)
		} else {
			b = (&wire.BlockRemoved{Hashes: hashes, DigestBytes: d, Medium: mediumArena}).Append(b,
				s.cfg.Hashes)
		}
		s.add(topic, n, b)
	}
}

// topic returns the topic of a space. It returns false if no worker has declared the space yet.
func (s *eventSource) topic(sp *engine.FollowedSpace) (string, bool) {
	if topic, ok := s.of[sp.Fingerprint]; ok {
		return topic, true
	}
	fields, ok := s.fields(sp.Fingerprint)
	if !ok {
		return "", false
	}
	if len(s.of) > 1024 { // spaces come and go
		clear(s.of)
	}
	topic := topicOf(s.cfg, sp.Fingerprint, fields)
	s.of[sp.Fingerprint] = topic
	return topic, true
}

// topicOf fills in a template: host, rank, fingerprint, and the fields that the space's worker
// declared.
func topicOf(cfg settings.EventsConfig, fp tiers.Fingerprint, fields map[string]string) string {
	return cfg.FillTopic(func(name string) string {
		switch name {
		case "host":
			host, _ := os.Hostname()
			return host
		case "rank":
			return strconv.Itoa(int(cfg.DPRank))
		case "fingerprint":
			return hex.EncodeToString(fp[:])
		}
		return fields[name]
	})
}
