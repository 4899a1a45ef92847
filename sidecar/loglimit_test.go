package sidecar

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"lookaside/ipc/client"
	"lookaside/ipc/wire"
	"lookaside/sidecar/settings"
)

// limitedLogger is a logger whose time the test makes pass.
type limitedLogger struct {
	*zap.Logger
	t     *testing.T
	out   *logBuffer
	lines *lineLimits

	at     time.Time
	timers map[time.Time][]func()
}

func newLimitedLogger(t *testing.T, level string) *limitedLogger {
	l := &limitedLogger{t: t, out: new(logBuffer), at: time.Now(), timers: map[time.Time][]func(){}}
	l.Logger = NewLogger(settings.LogConfig{Level: level, Format: "json"}, l.out)
	l.lines = l.Core().(*limitedCore).lines
	l.lines.now = func() time.Time { return l.at }
	l.lines.after = func(d time.Duration, f func()) {
		l.timers[l.at.Add(d)] = append(
			l.timers[l.at.Add(d)], f)
	}
	return l
}

func (l *limitedLogger) pass(d time.Duration) {
	l.at = l.at.Add(d)
	for at, timers := range l.timers {
		if !at.After(l.at) {
			delete(l.timers, at)
			for _, f := range timers {
				f()
			}
		}
	}
}

// said returns how many lines the log has of a message, and how many more it tells of.
func said(t *testing.T, log *logBuffer, message string) (lines, more int) {
	t.Helper()
	for text := range strings.Lines(log.String()) {
		var line struct {
			Msg     string
			AndMore int `json:"and_more"`
		}
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		switch {
		case line.Msg != message:
		case line.AndMore > 0:
			more += line.AndMore
		default:
			lines++
		}
	}
	return lines, more
}

func (l *limitedLogger) expect(message string, lines, more int) {
	l.t.Helper()
	if gotLines, gotMore := said(l.t, l.out, message); gotLines != lines || gotMore != more {
		l.t.Fatalf("%s: %d lines and %d more, want %d and %d", message, gotLines, gotMore, lines,
			more)
	}
}

func TestLogIsLimited(t *testing.T) {
	l := newLimitedLogger(t, "info")
	many := func(n int, message string) {
		for i := range n {
			l.Warn(message, zap.Int("i", i))
		}
	}
	many(1000, "refused")
	many(3, "rare")
	l.With(zap.String("more", "fields")).Named("other").Warn("refused") // another logger's
	l.expect("refused", logLines+1, 0)
	l.expect("rare", 3, 0)
	l.pass(logWindow)
	l.expect("refused", logLines+1, 1000-logLines)
	many(logLines, "refused")
	l.expect("refused", 2*logLines+1, 1000-logLines)
	l.pass(logWindow)
	l.expect("refused", 2*logLines+1, 1000-logLines) // none was left out
	// By fields of a logger, too.
	with := l.With(zap.String("session", "x"))
	for range 100 {
		with.Warn("with fields")
	}
	l.expect("with fields", logLines, 0)
	// What was left out is told at the end.
	if err := l.Sync(); err != nil {
		t.Fatal(err)
	}
	l.expect("with fields", logLines, 100-logLines)
	l.pass(2 * logWindow)
	l.expect("with fields", logLines, 100-logLines)

	// Long lines count by their bytes, and one is always written.
	for range 10 {
		l.Warn("long", zap.String("text", strings.Repeat("x", logBytes/2)))
	}
	l.expect("long", 2, 0)
	l.pass(logWindow)
	l.Warn("long", zap.String("text", strings.Repeat("x", 2*logBytes)))
	l.expect("long", 3, 8)

	// Messages that are all different are bounded as well.
	before := len(l.out.String())
	for i := range 100_000 {
		l.Info(fmt.Sprintf("message %d", i))
	}
	if n := len(l.out.String()) - before; n > 2*logMessages*200 {
		t.Errorf("%d bytes", n)
	}
	if len(l.lines.seen) > logMessages+1 {
		t.Errorf("%d messages are remembered", len(l.lines.seen))
	}
	l.pass(logWindow)
	l.Info("after")
	l.pass(logWindow)
	l.expect("after", 1, 0)

	debug := newLimitedLogger(t, "debug")
	for range 1000 {
		debug.Debug("detail")
	}
	debug.expect("detail", logDebugLines, 0)
}

// TestClientsCannotFillTheLog: loops of what clients can do wrong leave a few lines, which tell how
// many they stand for.
func TestClientsCannotFillTheLog(t *testing.T) {
	d, log := startDaemon(t, func(c *settings.Config) {
		c.Sessions.Limit = 2
		c.Log.Format = "json"
		c.Events.Endpoint, c.Events.Bind = "tcp://127.0.0.1:0", "true"
	})
	connect := func(hello *wire.Hello) *client.Session {
		s, err := client.Dial(d.cfg.Runtime.Dir, hello, patience)
		if err != nil {
			return nil
		}
		return s
	}
	good := wire.Hello{Role: wire.RoleWorker, EngineID: "e", PageTokens: 16, PageBytes: 4096,
		PagesPerChunk: 1, DigestBytes: 32}
	const loops = 300
	bad := good
	bad.DigestBytes = 7
	for range loops { // refused by what they ask for, and sessions that come and go
		if s := connect(&bad); s != nil {
			t.Fatal("a bad Hello is welcome")
		}
		if s := connect(&good); s != nil {
			s.Close()
		}
	}
	var held []*client.Session
	for len(held) < 2 {
		if s := connect(&good); s != nil {
			held = append(held, s)
		}
	}
	events, _ := d.events.pub.Endpoints()
	for range loops {
		if s := connect(&good); s != nil { // refused as one too many
			s.Close()
		}
		dialSaying(t, strings.TrimPrefix(events, "tcp://"),
			"no ZMTP, and long enough for a greeting, which has sixty-four bytes").Close()
		dialSaying(t, d.AdminAddr(), "no HTTP\r\n\r\n").Close()
	}
	for _, s := range held {
		s.Close()
	}
	if n := len(log.String()); n > 64<<10 {
		t.Errorf("%d KiB were logged", n>>10)
	}
	if lines, more := said(t, log, "session opened"); lines != logLines || more > 2*loops {
		t.Errorf("%d lines and %d more of opened sessions", lines, more)
	}
}
