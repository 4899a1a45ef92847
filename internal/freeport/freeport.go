// Package freeport finds ports of this machine for servers of tests.
package freeport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
)

var next atomic.Uint32

// Find is a TCP port on which nobody listens, and below those that the kernel gives to whoever asks
// for any, so that nobody gets it while its server is down. A process finds each but once in ten
// thousand calls. Safe for concurrent use.
func Find() (int, error) {
	for range 1000 {
		port := int(20000 + (next.Add(1)+uint32(os.Getpid())*37)%10000)
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no port is free")
}
