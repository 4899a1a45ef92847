package elsewhere

import (
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"lookaside/tiers"
)

// Options says which program to use. A zero field takes the stated default.
type Options struct {
	// Name of the tier. The program is told it.
	Name string
	// Command starts the program: its name, and its arguments. Socket is the path of a socket on
	// which a program listens. One of the two is required.
	Command []string
	Socket  string
	// Isolated has the program map none of the regions that are added. All values are copied once
	// more.
	Isolated bool
	// Claim returns a descriptor by which a later sidecar learns that the program may still write
	// to the regions; see ipc.Listener.Claim. Program owns it. Default: there is none.
	Claim func() (fd int, err error)
	// StartTimeout bounds the time from the start of the program, or the connect, to the first
	// message of the program. Default 60 s.
	StartTimeout time.Duration
	// CancelTimeout is how long the program may take to report a cancelled call. Default 1 s.
	CancelTimeout time.Duration
	// StatsEvery is how often the program is asked for figures; StatsTimeout is when one that does
	// not send them counts as hung. Defaults 1 s and 10 s.
	StatsEvery, StatsTimeout time.Duration
	// FirstPause is the pause before a program that has failed is tried again. It doubles up to
	// LastPause, and is FirstPause again after the program has served for SteadyAfter. Defaults 100
	// ms, 30 s and 10 s.
	FirstPause, LastPause, SteadyAfter time.Duration
	// EndTimeout is how long Close waits for the program to end by itself, or to leave. Default 3
	// s.
	EndTimeout time.Duration
	// ScratchBytes bounds the scratch memory. A single item may exceed it. Default 256 MiB.
	ScratchBytes int64
	// Log gets what an operator needs to know, and what a started program prints. Default: none.
	Log *zap.Logger
}

func setDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

func (o *Options) validate() error {
	setDefault(&o.StartTimeout, time.Minute)
	setDefault(&o.CancelTimeout, time.Second)
	setDefault(&o.StatsEvery, time.Second)
	setDefault(&o.StatsTimeout, 10*time.Second)
	setDefault(&o.FirstPause, 100*time.Millisecond)
	setDefault(&o.LastPause, 30*time.Second)
	setDefault(&o.SteadyAfter, 10*time.Second)
	setDefault(&o.EndTimeout, 3*time.Second)
	setDefault(&o.ScratchBytes, 256<<20)
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	if (len(o.Command) == 0) == (o.Socket == "") {
		return fmt.Errorf("%w: a program has a command or a socket, and not both", tiers.ErrInvalid)
	}
	if len(o.Socket) > maxPath {
		return fmt.Errorf("%w: the path of the socket has %d bytes, at most %d", tiers.ErrInvalid,
			len(o.Socket), maxPath)
	}
	if min(o.StartTimeout, o.CancelTimeout, o.StatsEvery, o.StatsTimeout, o.FirstPause,
		o.LastPause, o.SteadyAfter, o.EndTimeout) < 0 || o.ScratchBytes < 0 {
		return errors.New("a limit of the program is negative")
	}
	return nil
}

// maxPath is the longest path of a Unix socket.
const maxPath = 107

// Words splits a command into words as a shell does: at blanks, with single quotes, double quotes
// and backslashes. It expands nothing. It returns an error for a quote that does not end.
func Words(command string) (words []string, err error) {
	var word []byte
	in, begun := byte(0), false // the quote that we are in; whether a word has begun
	for i := 0; i < len(command); i++ {
		c := command[i]
		switch {
		case c == '\\' && in != '\'' && i+1 < len(command):
			i++
			if in == '"' && command[i] != '"' && command[i] != '\\' {
				word = append(word, c)
			}
			word, begun = append(word, command[i]), true
		case c == in:
			in = 0
		case in == 0 && (c == '\'' || c == '"'):
			in, begun = c, true
		case in == 0 && (c == ' ' || c == '\t' || c == '\n'):
			if begun {
				words, word, begun = append(words, string(word)), word[:0], false
			}
		default:
			word, begun = append(word, c), true
		}
	}
	if in != 0 {
		return nil, fmt.Errorf("the quote %c does not end", in)
	}
	if begun {
		words = append(words, string(word))
	}
	return words, nil
}
