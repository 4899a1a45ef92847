package recording

import (
	"bytes"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
)

// maxWindow bounds the memory that decompressing a file takes.
const maxWindow = 32 << 20

// zstdMagic begins a compressed file.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// IsRecording reports whether a file that begins so, with at least 8 bytes, may be a recording,
// compressed or not.
func IsRecording(begin []byte) bool {
	return bytes.HasPrefix(begin, zstdMagic) || bytes.HasPrefix(begin, []byte(magic))
}

// Compressed writes a stream to a file. It is not safe for concurrent use.
type Compressed struct {
	out  *counter
	zstd *zstd.Encoder
}

type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.n += int64(n)
	return n, err
}

// Compress returns a writer that compresses a stream into w.
func Compress(w io.Writer) (*Compressed, error) {
	c := &Compressed{out: &counter{w: w}}
	var err error
	c.zstd, err = zstd.NewWriter(c.out, zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(maxWindow/2))
	return c, err
}

// Write implements io.Writer.
func (c *Compressed) Write(b []byte) (int, error) { return c.zstd.Write(b) }

// Flush writes out everything so far, so that a reader of the file finds it.
func (c *Compressed) Flush() error { return c.zstd.Flush() }

// Size returns the bytes that were written out.
func (c *Compressed) Size() int64 { return c.out.n }

// Close ends the file. It does not close the writer below.
func (c *Compressed) Close() error { return c.zstd.Close() }

// A File reads a recording, compressed or not.
type File struct {
	*Reader
	zstd *zstd.Decoder // nil: it is not compressed
}

// Open returns a reader of a recording. It takes at most some 64 MiB, whatever the file holds.
func Open(in io.Reader) (*File, error) {
	head := make([]byte, len(zstdMagic))
	n, err := io.ReadFull(in, head)
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && err != io.EOF {
		return nil, err
	}
	in = io.MultiReader(bytes.NewReader(head[:n]), in)
	if !bytes.Equal(head[:n], zstdMagic) {
		return &File{Reader: NewReader(in)}, nil
	}
	d, err := zstd.NewReader(in, zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
	if err != nil {
		return nil, err
	}
	return &File{Reader: NewReader(d), zstd: d}, nil
}

// Next reads the next record, as Reader.Next does. A compressed file that is damaged is an error
// that wraps ErrDamaged.
func (f *File) Next(rec *Record) error {
	err := f.Reader.Next(rec)
	switch {
	case err == nil, err == io.EOF, errors.Is(err, ErrCut), errors.Is(err, ErrDamaged),
		f.zstd == nil:
		return err
	}
	if f.begun {
		return errors.Join(ErrDamaged, err)
	}
	return err
}

// PartOf returns which part of a recording a file is; the zero Part if it is a whole one. An error
// of the file is left to its reader.
func PartOf(in io.Reader) Part {
	f, err := Open(in)
	if err != nil {
		return Part{}
	}
	defer f.Close()
	var rec Record
	if f.Next(&rec) != nil || rec.Kind != KindPart {
		return Part{}
	}
	return rec.Part
}

// Close frees the reader's memory. It does not close what it reads from.
func (f *File) Close() {
	if f.zstd != nil {
		f.zstd.Close()
	}
}
