// Package freeport finds free ports of this machine for test servers.
package freeport

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync/atomic"
)

var next atomic.Uint32

// Find returns a TCP port on which no process listens. It is below the ports that the kernel
// assigns, so no other process gets it while its server is down. In one process a port repeats only
// after ten thousand calls. Safe for concurrent use.
func Find() (int, error) {
	for range 1000 {
		port := int(20000 + (next.Add(1)+uint32(os.Getpid())*37)%10000)
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no port is free")
}
