package settings

import (
	"errors"
	"path/filepath"
	"strings"
	"time"

	"lookaside/tiers/elsewhere"
)

// ProgramConfig configures a tier that a program of another process keeps.
type ProgramConfig struct {
	Command       []string // that starts it; nil: it listens on Socket
	Socket        string   // path
	Isolate       bool     // it does not map the arena
	StartTimeout  time.Duration
	CancelTimeout time.Duration
}

// programSocket begins the short form of a program that listens.
const programSocket = "unix:"

var programSettings = []TierSetting{
	{
		Key: "command", Kinds: []string{TierProgram}, Unit: "words, with quotes as in a shell",
		Meaning: "The program that is the tier, and its arguments; see tiers-elsewhere.md. The sidecar starts it, ends it, and starts it again when it has failed. No shell is run. Set this or socket.",
		set: func(c *TierConfig, v string) (err error) {
			if c.Program.Command, err = elsewhere.Words(v); err == nil &&
				len(c.Program.Command) == 0 {
				err = errors.New("it has no words")
			}
			return err
		},
	},
	{
		Key: "socket", Kinds: []string{TierProgram}, Unit: "absolute path",
		Meaning: "The Unix socket of a program that somebody else starts. The sidecar connects to it, and again when it has lost it.",
		set: func(c *TierConfig, v string) error {
			if !filepath.IsAbs(v) {
				return errors.New("it is not an absolute path")
			}
			c.Program.Socket = v
			return nil
		},
	},
	flagSetting("isolate", []string{TierProgram},
		"Whether the program is kept from the arena's memory. All chunks are then copied once more, and the program need not be trusted with anything.",
		func(c *TierConfig) *bool { return &c.Program.Isolate }),
	timeoutSetting("start_timeout", "60s",
		"How long the program may take from its start to its first message. Then it is ended and started again.",
		[]string{TierProgram},
		func(c *TierConfig) *time.Duration { return &c.Program.StartTimeout }),
	timeoutSetting("cancel_timeout", "1s",
		"How long the program may take to end a call that was cancelled. Then a program that the sidecar has started is killed; one that listens is left, and the tier is off until it has let the memory go.",
		[]string{TierProgram},
		func(c *TierConfig) *time.Duration { return &c.Program.CancelTimeout }),
}

// check checks rules that concern several keys.
func (p *ProgramConfig) check() error {
	switch {
	case len(p.Command) == 0 && p.Socket == "":
		return errors.New("command is missing: add command: PROGRAM ARGUMENTS…, or socket: PATH for a program that listens")
	case len(p.Command) > 0 && p.Socket != "":
		return errors.New("command and socket: set one of them")
	}
	return nil
}

// shortProgram returns the keys of the short form: a command, or the path of a socket behind unix:.
func shortProgram(v string) [2]string {
	if path, ok := strings.CutPrefix(v, programSocket); ok {
		return [2]string{"socket", path}
	}
	return [2]string{"command", v}
}
