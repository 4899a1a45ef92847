package main

import (
	"encoding/binary"
	"io"
	"net"
	"time"
)

// A zmtp is one raw connection to a ZMQ socket. It can send what libzmq would never send. See RFC
// 23 (ZMTP 3.0) of ZeroMQ.
type zmtp struct{ net.Conn }

// dialZMTP connects and sends a greeting with the NULL mechanism, and reads the peer's.
func dialZMTP(network, address, socketType string) (*zmtp, error) {
	c, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return nil, err
	}
	z := &zmtp{c}
	if err := z.greet(socketType); err != nil {
		c.Close()
		return nil, err
	}
	return z, nil
}

func (z *zmtp) greet(socketType string) error {
	if err := z.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return err
	}
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	if _, err := z.Write(greeting); err != nil {
		return err
	}
	if _, err := io.ReadFull(z, make([]byte, 64)); err != nil {
		return err
	}
	ready := append([]byte{5}, "READY"...)
	ready = append(ready, byte(len("Socket-Type")))
	ready = append(ready, "Socket-Type"...)
	ready = binary.BigEndian.AppendUint32(ready, uint32(len(socketType)))
	ready = append(ready, socketType...)
	if _, err := z.Write(append([]byte{4, byte(len(ready))}, ready...)); err != nil {
		return err
	}
	head := make([]byte, 2)
	if _, err := io.ReadFull(z, head); err != nil {
		return err
	}
	if _, err := io.ReadFull(z, make([]byte, head[1])); err != nil { // the rest of its own READY
		return err
	}
	return z.SetDeadline(time.Time{})
}

// frame sends one frame of a message. With more it is not the last one.
func (z *zmtp) frame(body []byte, more bool) error {
	flags := byte(2) // a long frame
	if more {
		flags |= 1
	}
	head := binary.BigEndian.AppendUint64([]byte{flags}, uint64(len(body)))
	if err := z.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err := z.Write(append(head, body...))
	return err
}

// announce begins a frame and declares its length.
func (z *zmtp) announce(length uint64) error {
	if err := z.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err := z.Write(binary.BigEndian.AppendUint64([]byte{2}, length))
	return err
}
