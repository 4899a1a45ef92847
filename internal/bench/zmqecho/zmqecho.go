// Package zmqecho is the simplest possible lookup server over ZMQ: it receives a message on one
// socket and sends one on another. The cost of a round trip through it is the limit for lookups.
package zmqecho

import (
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/pebbe/zmq4"
)

// Serve binds a PULL to one endpoint and a PUSH to another. It replies to each message with
// replyBytes bytes, or with the message itself if replyBytes is negative. It locks its goroutine to
// its thread, as the lookup server does. It calls ready after both are bound, and returns after its
// reply to an empty message.
func Serve(pullEndpoint, pushEndpoint string, replyBytes int, ready func()) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, err := zmq4.NewContext()
	if err != nil {
		return fmt.Errorf("zmq echo: %w", err)
	}
	defer func() { err = errors.Join(err, ctx.Term()) }()
	pull, err := bind(ctx, zmq4.PULL, pullEndpoint)
	if err != nil {
		return err
	}
	defer pull.Close()
	push, err := bind(ctx, zmq4.PUSH, pushEndpoint)
	if err != nil {
		return err
	}
	defer push.Close()
	ready()
	reply := make([]byte, max(replyBytes, 0))
	for {
		msg, err := pull.RecvBytes(0)
		if err != nil {
			return fmt.Errorf("zmq echo: receive: %w", err)
		}
		out := reply
		if replyBytes < 0 {
			out = msg
		}
		if _, err := push.SendBytes(out, 0); err != nil {
			return fmt.Errorf("zmq echo: send: %w", err)
		}
		if len(msg) == 0 {
			return nil
		}
	}
}

func bind(ctx *zmq4.Context, t zmq4.Type, endpoint string) (*zmq4.Socket, error) {
	s, err := ctx.NewSocket(t)
	if err != nil {
		return nil, fmt.Errorf("zmq echo: %w", err)
	}
	// A client that has gone must not keep the last reply, and this function, forever.
	if err := errors.Join(s.SetLinger(time.Second), s.Bind(endpoint)); err != nil {
		s.Close()
		return nil, fmt.Errorf("zmq echo: bind %s: %w", endpoint, err)
	}
	return s, nil
}
