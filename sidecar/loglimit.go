package sidecar

import (
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// These bound the lines and bytes of one message in each logWindow. Without them a client that
// repeats a logged action, such as connecting and being refused, could fill a disk.
const (
	logWindow     = 10 * time.Second
	logLines      = 20
	logDebugLines = 200
	logBytes      = 16 << 10
	// logMessages bounds the messages that are counted separately. The program has a few hundred,
	// not counting their variable parts.
	logMessages = 1000
)

// limitedCore is a zapcore.Core that writes the first lines of each message in a window, and at the
// end of the window how many were left out. It is at the bottom of every logger, so all lines are
// limited.
type limitedCore struct {
	zapcore.LevelEnabler
	enc   zapcore.Encoder
	lines *lineLimits
}

// lineLimits is shared by limitedCores with different fields.
type lineLimits struct {
	out   zapcore.WriteSyncer
	plain zapcore.Encoder // without fields
	now   func() time.Time
	after func(time.Duration, func()) // as time.AfterFunc

	mu   sync.Mutex
	seen map[lineKey]*lineCount
}

type lineKey struct {
	level   zapcore.Level
	logger  string
	message string
}

// lineCount counts one message in its window.
type lineCount struct {
	began       time.Time
	lines       int
	bytes, more int
}

func newLimitedCore(enc zapcore.Encoder, out zapcore.WriteSyncer,
	level zapcore.LevelEnabler) *limitedCore {
	return &limitedCore{level, enc, &lineLimits{
		out: out, plain: enc.Clone(), now: time.Now, after: func(d time.Duration,
			f func()) {
			time.AfterFunc(d, f)
		}, seen: map[lineKey]*lineCount{},
	}}
}

// With implements zapcore.Core.
func (c *limitedCore) With(fields []zapcore.Field) zapcore.Core {
	enc := c.enc.Clone()
	for _, f := range fields {
		f.AddTo(enc)
	}
	return &limitedCore{c.LevelEnabler, enc, c.lines}
}

// Check implements zapcore.Core.
func (c *limitedCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c *limitedCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if e.Level >= zapcore.DPanicLevel {
		return c.lines.write(c.enc, e, fields, nil)
	}
	count := c.lines.admit(lineKey{e.Level, e.LoggerName, e.Message})
	if count == nil {
		return nil
	}
	return c.lines.write(c.enc, e, fields, count)
}

// Sync implements zapcore.Core.
func (c *limitedCore) Sync() error {
	l := c.lines
	l.mu.Lock()
	var keys []lineKey
	for k := range l.seen {
		keys = append(keys, k)
	}
	l.mu.Unlock()
	for _, k := range keys {
		l.tell(k)
	}
	return l.out.Sync()
}

// write writes a line and charges its bytes to count, unless count is nil.
func (l *lineLimits) write(enc zapcore.Encoder, e zapcore.Entry, fields []zapcore.Field,
	count *lineCount) error {
	b, err := enc.EncodeEntry(e, fields)
	if err != nil {
		return err
	}
	if count != nil {
		l.mu.Lock()
		count.bytes += b.Len()
		l.mu.Unlock()
	}
	_, err = l.out.Write(b.Bytes())
	b.Free()
	return err
}

// admit returns the count of a message that may be written, or nil.
func (l *lineLimits) admit(k lineKey) *lineCount {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now()
	count := l.seen[k]
	if count == nil && len(l.seen) >= logMessages {
		for k, c := range l.seen {
			if now.Sub(c.began) >= logWindow && c.more == 0 {
				delete(l.seen, k)
			}
		}
		if len(l.seen) >= logMessages {
			k.message, k.logger = "other messages", ""
			count = l.seen[k]
		}
	}
	if count == nil {
		count = &lineCount{began: now}
		l.seen[k] = count
	}
	if now.Sub(count.began) >= logWindow && count.more == 0 {
		*count = lineCount{began: now}
	}
	most := logLines
	if k.level == zapcore.DebugLevel {
		most = logDebugLines
	}
	if count.lines < most && count.bytes < logBytes {
		count.lines++
		return count
	}
	if count.more++; count.more == 1 {
		l.after(max(logWindow-now.Sub(count.began), 0), func() { l.tell(k) })
	}
	return nil
}

// tell writes how many lines of a message were left out, if any, and starts a new window for it.
func (l *lineLimits) tell(k lineKey) {
	l.mu.Lock()
	count := l.seen[k]
	if count == nil || count.more == 0 {
		l.mu.Unlock()
		return
	}
	now := l.now()
	more, since := count.more, now.Sub(count.began)
	*count = lineCount{began: now}
	l.mu.Unlock()
	_ = l.write(l.plain, zapcore.Entry{Level: k.level, Time: now, LoggerName: k.logger,
		Message: k.message},
		[]zapcore.Field{zap.Int("and_more", more),
			zap.Duration("within", since.Round(time.Second))}, nil)
}
