package remote

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"lookaside/tiers"
	"lookaside/tiers/serde"
)

// An object in a bucket is PREFIX/SPACE/FIRST/LAST-PAGES: the header, and the encoded pages behind
// it.
const (
	maxListing = 1000 // names of one listing, S3's own limit
	// maxVariantNames bounds the names kept of all listings of one chunk.
	maxVariantNames = 1 << 16
)

// Limits of a reply that is not an object. The client parses such a reply as a whole, and uses up
// to hundreds of bytes for each byte of XML. So replies are read and checked before. A listing of
// 1,000 names has some 0.5 MiB, any other reply less than 2 KiB.
const (
	shortAnswer = 64 << 10
	longAnswer  = 1 << 20
	longAnswers = 4 // concurrent ones longer than shortAnswer
	// tagsPerName and marksPerName bound a listing's angle brackets and equals signs.
	tagsPerName  = 32
	marksPerName = 8
	// shortTags bounds those of other replies.
	shortTags = 200
)

type s3Objects struct {
	client   minio.Core
	http     *http.Transport
	o        S3Options
	requests chan struct{} // room for Pool
	secrets  secrets
}

// OpenS3 makes a tier of a bucket. It sends the server nothing; Check does. It returns an error for
// wrong options or unreadable files.
func OpenS3(o S3Options) (*Tier, error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("s3: %w", err)
	}
	s := &s3Objects{o: o, requests: make(chan struct{}, o.Pool)}
	creds, err := s.credentials()
	if err != nil {
		return nil, fmt.Errorf("s3: %w", err)
	}
	conf, err := o.Files.config()
	if err != nil {
		return nil, fmt.Errorf("s3: %w", err)
	}
	endpoint, _ := url.Parse(o.Endpoint) // validated before
	dialer := &net.Dialer{Timeout: o.DialTimeout, KeepAlive: time.Minute}
	s.http = &http.Transport{
		Proxy: http.ProxyFromEnvironment, DialContext: dialer.DialContext, TLSClientConfig: conf,
		TLSHandshakeTimeout: o.DialTimeout, ForceAttemptHTTP2: false,
		MaxIdleConns: o.Pool, MaxIdleConnsPerHost: o.Pool, MaxConnsPerHost: o.Pool,
		IdleConnTimeout: 90 * time.Second, MaxResponseHeaderBytes: 64 << 10,
		DisableCompression: true, ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10,
	}
	lookup := minio.BucketLookupPath
	if o.VirtualHost || strings.HasSuffix(endpoint.Hostname(), ".amazonaws.com") {
		lookup = minio.BucketLookupDNS
	}
	client, err := minio.New(endpoint.Host, &minio.Options{
		Creds: creds, Secure: endpoint.Scheme == "https", Region: o.Region, BucketLookup: lookup,
		Transport:  &bounded{s.http, make(chan struct{}, longAnswers)},
		MaxRetries: 1, // package stack decides
	})
	if err != nil {
		return nil, fmt.Errorf("s3: endpoint: %w", err)
	}
	s.client = minio.Core{Client: client}
	return newTier("s3", o.detail(), o.Serde, s), nil
}

func (o *S3Options) detail() string {
	return fmt.Sprintf("%s, bucket %s, prefix %s, %s", o.Endpoint, o.Bucket, o.Prefix, o.Serde)
}

// credentials returns the credentials for signing. It remembers the secrets, so that they can be
// removed from what is shown.
func (s *s3Objects) credentials() (*credentials.Credentials, error) {
	if s.o.CredentialsFile != "" {
		c := credentials.NewFileAWSCredentials(s.o.CredentialsFile, s.o.Profile)
		v, err := c.GetWithContext(nil)
		if err != nil || v.AccessKeyID == "" || v.SecretAccessKey == "" {
			// The library's error may contain a part of the file.
			return nil, fmt.Errorf("credentials_file: %s cannot be read, or has no aws_access_key_id and aws_secret_access_key in its section %s", s.o.CredentialsFile, s.o.Profile)
		}
		s.secrets.add(v.SecretAccessKey)
		s.secrets.add(v.SessionToken)
		return c, nil
	}
	key, secret, token := os.Getenv(s.o.AccessKeyEnv), os.Getenv(s.o.SecretKeyEnv),
		os.Getenv(s.o.SessionTokenEnv)
	if (key == "") != (secret == "") {
		return nil, fmt.Errorf("of the environment variables %s and %s only one is set",
			s.o.AccessKeyEnv, s.o.SecretKeyEnv)
	}
	s.secrets.add(secret)
	s.secrets.add(token)
	return credentials.NewStaticV4(key, secret, token), nil
}

// bounded is a RoundTripper that reads replies which are not objects, and refuses those that are
// too large for the client's parser.
type bounded struct {
	http.RoundTripper
	long chan struct{} // room for longAnswers
}

// objectKey marks the context of requests for objects. Their bodies are read only as far as needed.
type objectKey struct{}

var errTooLong = errors.New("the server's reply is too long")

// RoundTrip implements http.RoundTripper.
func (b *bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	a, err := b.RoundTripper.RoundTrip(r)
	if err != nil || a.StatusCode/100 == 2 && r.Method == http.MethodGet &&
		r.Context().Value(objectKey{}) != nil {
		return a, err
	}
	whole := a.Body
	defer whole.Close()
	// Listings are requested by GET, deletions of several names by POST.
	names := 0
	if a.StatusCode/100 == 2 && (r.Method == http.MethodGet || r.Method == http.MethodPost) {
		names = maxListing
	}
	text, end, err := b.read(r.Context(), whole, names > 0)
	if err == nil && !parsable(text, names) {
		err = errTooLong
	}
	if err != nil {
		end()
		return nil, err
	}
	a.Body = &readAnswer{Reader: bytes.NewReader(text), end: end}
	return a, nil
}

// read reads a reply. The caller calls end once it is parsed, also after an error.
func (b *bounded) read(ctx context.Context, body io.Reader, long bool) (text []byte, end func(),
	err error) {
	end = func() {}
	text, err = io.ReadAll(io.LimitReader(body, shortAnswer+1))
	if err != nil || len(text) <= shortAnswer {
		return text, end, err
	}
	if !long {
		return nil, end, errTooLong
	}
	select {
	case b.long <- struct{}{}:
		end = sync.OnceFunc(func() { <-b.long })
	case <-ctx.Done():
		return nil, end, context.Cause(ctx)
	}
	rest, err := io.ReadAll(io.LimitReader(body, longAnswer-shortAnswer))
	if text = append(text, rest...); err == nil && len(text) > longAnswer {
		err = errTooLong
	}
	return text, end, err
}

// parsable reports whether a reply with up to that many names has no more elements than it needs.
func parsable(text []byte, names int) bool {
	count := func(what string) int { return bytes.Count(text, []byte(what)) }
	return count("<") <= shortTags+names*tagsPerName && count("=") <= shortTags+
		names*marksPerName &&
		// counts the tags of the largest elements, and such text in names
		count("Contents") <= shortTags+4*names
}

// readAnswer is the body of a reply that was read.
type readAnswer struct {
	io.Reader
	end func()
}

// Close implements io.Closer.
func (a *readAnswer) Close() error {
	a.end()
	return nil
}

// dir returns the beginning of the names of all objects that begin with a name's first page.
func (s *s3Objects) dir(space *tiers.Space, first string) string {
	return fmt.Sprintf("%s/%s/%x/", s.o.Prefix, space.Fingerprint, first)
}

func (s *s3Objects) key(n name) string { return s.dir(n.space, n.first) + string(n.append(nil)) }

// turn waits for one of Pool turns.
func (s *s3Objects) turn(ctx context.Context) (end func(), err error) {
	select {
	case s.requests <- struct{}{}:
		return func() { <-s.requests }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// missing reports whether an error means that an object does not exist.
func missing(err error) bool {
	code := minio.ToErrorResponse(err).Code
	return code == minio.NoSuchKey || code == "NotFound"
}

func (s *s3Objects) has(ctx context.Context, names []name, there []bool) error {
	var first atomic.Int64 // that is not there, or that was not asked for
	first.Store(int64(len(names)))
	errs := make([]error, len(names))
	inParallel(len(names), s.o.Pool, func(i int) {
		if int64(i) > first.Load() {
			return
		}
		if there[i], errs[i] = s.stat(ctx, names[i]); there[i] {
			return
		}
		for at := first.Load(); int64(i) < at &&
			!first.CompareAndSwap(at, int64(i)); at = first.Load() {
		}
	})
	if at := first.Load(); at < int64(len(names)) {
		return errs[at]
	}
	return nil
}

func (s *s3Objects) stat(ctx context.Context, n name) (bool, error) {
	end, err := s.turn(ctx)
	if err != nil {
		return false, err
	}
	defer end()
	_, err = s.client.StatObject(ctx, s.o.Bucket, s.key(n), minio.StatObjectOptions{})
	if missing(err) {
		return false, nil
	}
	return err == nil, err
}

func (s *s3Objects) variants(ctx context.Context, runs []tiers.Run,
	look look) ([][]variant, error) {
	out, errs := make([][]variant, len(runs)), make([]error, len(runs))
	inParallel(len(runs), s.o.Pool, func(i int) { out[i], errs[i] = s.list(ctx, runs[i], look) })
	return out, firstOf(errs)
}

// firstOf returns the first non-nil error.
func firstOf(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (s *s3Objects) list(ctx context.Context, run tiers.Run, look look) ([]variant, error) {
	dir := s.dir(run.Space, nameOf(run, 1).first)
	end, err := s.turn(ctx)
	if err != nil {
		return nil, err
	}
	var out []variant
	var times []time.Time
	more := false
	for o := range s.client.ListObjectsIter(ctx, s.o.Bucket, minio.ListObjectsOptions{Prefix: dir,
		Recursive: true, MaxKeys: maxListing}) {
		if o.Err != nil {
			end()
			return nil, o.Err
		}
		if more = look != lookForAll && len(out) == maxListing; more {
			break
		}
		if n, ok := parseName(run, strings.TrimPrefix(o.Key, dir)); ok {
			if len(out) == maxVariantNames {
				end()
				return nil, errTooLong
			}
			out, times = append(out, variant{n, true}), append(times, o.LastModified)
		}
	}
	end()
	if look == lookForAll {
		return out, nil
	}
	order := make([]int, len(out))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return times[b].Compare(times[a]) })
	sorted := make([]variant, len(out))
	for i, at := range order {
		sorted[i] = out[at]
	}
	if !more {
		return sorted, nil
	}
	// There are more names than one listing has, so ask for the beginnings of the run by name.
	names, there, errs := make([]name, run.Pages()), make([]bool, run.Pages()),
		make([]error, run.Pages())
	inParallel(len(names), s.o.Pool, func(i int) {
		names[i] = nameOf(run, i+1)
		if !slices.Contains(sorted, variant{names[i], true}) {
			there[i], errs[i] = s.stat(ctx, names[i])
		}
	})
	for i, n := range names {
		if there[i] {
			sorted = append(sorted, variant{n, true})
		}
	}
	return sorted, firstOf(errs)
}

// get starts to read an object's first bytes. size is how many of them the server will send. The
// caller may leave bytes unread.
func (s *s3Objects) get(ctx context.Context, n name, first int64) (body io.ReadCloser, size int64,
	err error) {
	var o minio.GetObjectOptions
	if err := o.SetRange(0, first-1); err != nil {
		return nil, 0, err
	}
	body, info, _, err := s.client.GetObject(context.WithValue(ctx, objectKey{}, true), s.o.Bucket,
		s.key(n), o)
	switch {
	case missing(err):
		err = tiers.ErrNotFound
	case minio.ToErrorResponse(err).Code == "InvalidRange": // it is empty
		err = errTorn
	}
	return body, info.Size, err
}

// errTorn means that an object is too short: some servers keep the part that they got before a
// connection broke. It counts as missing.
var errTorn = fmt.Errorf("%w whole", tiers.ErrNotFound)

// readHeader reads an object's header.
func readHeader(n name, body io.Reader, size int64) ([]byte, error) {
	b := make([]byte, headerBytes(n.pages, n.space.Geometry.DigestBytes))
	if size < int64(len(b)) {
		return nil, errTorn
	}
	_, err := io.ReadFull(body, b)
	return b, err
}

func (s *s3Objects) headers(ctx context.Context, names []name, each func(i int, b []byte,
	err error)) {
	bufs, errs := make([][]byte, len(names)), make([]error, len(names))
	inParallel(len(names), s.o.Pool, func(i int) {
		bufs[i], errs[i] = func() ([]byte, error) {
			end, err := s.turn(ctx)
			if err != nil {
				return nil, err
			}
			defer end()
			n := names[i]
			body, size, err := s.get(ctx, n,
				int64(headerBytes(n.pages, n.space.Geometry.DigestBytes)))
			if err != nil {
				return nil, err
			}
			defer body.Close()
			return readHeader(n, body, size)
		}()
	})
	for i := range names {
		each(i, bufs[i], errs[i])
	}
}

func (s *s3Objects) fetch(ctx context.Context, fetches []*fetch) {
	inParallel(len(fetches), s.o.Pool, func(i int) {
		f := fetches[i]
		err := s.fetchOne(ctx, f)
		if errors.Is(err, errTorn) {
			_ = s.remove(ctx, []name{f.name})
		}
		f.end(err)
	})
}

func (s *s3Objects) fetchOne(ctx context.Context, f *fetch) error {
	end, err := s.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	head := int64(headerBytes(f.name.pages, f.name.space.Geometry.DigestBytes))
	// The encoded length is known once the header is read. This is its bound.
	most := int64(len(f.dst))
	if _, raw := f.tier.codec.(serde.Raw); !raw {
		most = int64(f.run.Pages()) * serde.Bound(f.run.Space.Geometry.PageBytes)
	}
	body, size, err := s.get(ctx, f.name, head+most)
	if err != nil {
		return err
	}
	defer body.Close()
	b, err := readHeader(f.name, body, size)
	if err != nil {
		return err
	}
	stream, err := f.begin(b)
	if err != nil {
		return err
	}
	if size < head+int64(len(stream)) {
		return errTorn
	}
	if _, err = io.ReadFull(body, stream); err == nil && size-head-int64(len(stream)) < 64<<10 {
		_, _ = io.Copy(io.Discard, body) // the connection can then be reused
	}
	return err
}

func (s *s3Objects) put(ctx context.Context, puts []*put) {
	inParallel(len(puts), s.o.Pool, func(i int) { puts[i].end(s.putOne(ctx, puts[i])) })
}

func (s *s3Objects) putOne(ctx context.Context, w *put) error {
	end, err := s.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	stream, err := w.begin()
	if err != nil {
		return err
	}
	head := w.header(0)
	// The client's checksums would be a second pass; the object has ours.
	_, err = s.client.Client.PutObject(ctx, s.o.Bucket, s.key(w.name),
		io.MultiReader(bytes.NewReader(head), bytes.NewReader(stream)),
		int64(len(head)+len(stream)),
		minio.PutObjectOptions{DisableMultipart: true, DisableContentSha256: true,
			ContentType: "application/octet-stream"})
	return err
}

func (s *s3Objects) remove(ctx context.Context, names []name) error {
	errs := make([]error, len(names))
	inParallel(len(names), s.o.Pool, func(i int) {
		end, err := s.turn(ctx)
		if err == nil {
			err = s.client.RemoveObject(ctx, s.o.Bucket, s.key(names[i]),
				minio.RemoveObjectOptions{})
			end()
		}
		if !missing(err) {
			errs[i] = err
		}
	})
	return firstOf(errs)
}

func (s *s3Objects) clear(ctx context.Context, fp tiers.Fingerprint) (n int, err error) {
	prefix := s.o.Prefix + "/"
	if fp != (tiers.Fingerprint{}) {
		prefix += fp.String() + "/"
	}
	end, err := s.turn(ctx)
	if err != nil {
		return 0, err
	}
	defer end()
	ours := func(yield func(minio.ObjectInfo) bool) {
		for o := range s.client.ListObjectsIter(ctx, s.o.Bucket,
			minio.ListObjectsOptions{Prefix: prefix, Recursive: true}) {
			if o.Err != nil {
				err = o.Err
				return
			}
			// Remove only names of our form: another service's prefix may begin with ours.
			if space, _, _ := strings.Cut(strings.TrimPrefix(o.Key, s.o.Prefix+"/"),
				"/"); len(space) != 2*len(fp) {
				continue
			}
			if !yield(o) {
				return
			}
		}
	}
	results, rerr := s.client.RemoveObjectsWithIter(ctx, s.o.Bucket,
		iter.Seq[minio.ObjectInfo](ours), minio.RemoveObjectsOptions{})
	if rerr != nil {
		return 0, rerr
	}
	for r := range results {
		if r.Err != nil && !missing(r.Err) {
			return n, r.Err
		}
		n++
	}
	return n, err
}

func (s *s3Objects) check(ctx context.Context) error {
	end, err := s.turn(ctx)
	if err != nil {
		return err
	}
	defer end()
	there, err := s.client.BucketExists(ctx, s.o.Bucket)
	if err == nil && !there {
		err = errNoBucket
	}
	return err
}

var errNoBucket = errors.New("the bucket is not there")

func (s *s3Objects) explain(err error) error {
	shown, where := s.secrets.scrub(err.Error()), fmt.Sprintf("s3 at %s", s.o.detail())
	answer := minio.ToErrorResponse(err)
	switch code := answer.Code; {
	case errors.Is(err, errNoBucket) || code == "NoSuchBucket":
		return fmt.Errorf("%s: the bucket is not there: make it, or look at url", where)
	case code != "AccessDenied" && answer.StatusCode == http.StatusForbidden ||
		strings.Contains(code, "NoSuchUser") || strings.Contains(code, "UserNotFound"):
		return fmt.Errorf("%s refuses the credentials: look at credentials_file, or at %s and %s in the environment: %s", where, s.o.AccessKeyEnv, s.o.SecretKeyEnv, shown)
	case code == "AccessDenied":
		return fmt.Errorf("%s does not let these credentials do this: they need to list, get, put and delete under the prefix: %s", where, shown)
	case slices.Contains([]string{"XMinioStorageFull", "InsufficientStorage", "QuotaExceeded",
		"XQuotaExceeded"}, code):
		return fmt.Errorf("%w: %s is full: %s", tiers.ErrBusy, where, shown)
	case strings.Contains(shown, "x509:") || strings.Contains(shown, "tls:"):
		return fmt.Errorf("%s: TLS: look at ca_file and at endpoint: %s", where, shown)
	}
	return fmt.Errorf("%s: %s", where, shown)
}

func (s *s3Objects) close() { s.http.CloseIdleConnections() }
