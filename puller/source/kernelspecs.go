package source

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"unicode"
)

// maxImageName bounds what is taken for an image's name: distribution/reference
// allows 255 bytes for a repository and 128 for a tag.
const maxImageName = 4096

// decodeKernelspecs finds the images in an Enterprise Gateway's answer to
// GET /api/kernelspecs. One kernelspec that is not as it should be is left out
// with a warning; an answer that is no list of kernelspecs is an error.
func decodeKernelspecs(body []byte) (Answer, error) {
	var doc struct {
		Kernelspecs *map[string]json.RawMessage `json:"kernelspecs"`
	}
	if err := json.Unmarshal(body, &doc); err != nil {
		return Answer{}, notJSON(body, err)
	}
	if doc.Kernelspecs == nil {
		return Answer{}, errors.New("the answer is JSON without kernelspecs")
	}
	var a Answer
	if len(*doc.Kernelspecs) == 0 {
		a.Warnings = append(a.Warnings, "the gateway lists no kernelspec")
	}
	for _, name := range slices.Sorted(maps.Keys(*doc.Kernelspecs)) {
		images, err := kernelImages((*doc.Kernelspecs)[name])
		for _, image := range images {
			a.add(image)
		}
		if err != nil {
			a.Warnings = append(a.Warnings, fmt.Sprintf("kernelspec %q is broken: %v", shorten(name), err))
		}
	}
	return a, nil
}

// notJSON says what came instead of JSON, without showing it.
func notJSON(body []byte, err error) error {
	text := strings.TrimSpace(string(body[:min(len(body), 512)]))
	var syntax *json.SyntaxError
	switch {
	case text == "":
		return errors.New("the answer is empty")
	case strings.HasPrefix(text, "<"):
		return errors.New("the answer is HTML, not JSON: is this the gateway's address?")
	case errors.As(err, &syntax) && syntax.Offset >= int64(len(body)):
		return fmt.Errorf("the answer ends in the middle: %w", io.ErrUnexpectedEOF)
	case errors.As(err, &syntax):
		return fmt.Errorf("the answer is not JSON from byte %d on", syntax.Offset)
	}
	return errors.New("the answer is JSON, but no list of kernelspecs")
}

// kernelImages returns the images of one kernelspec. The process proxy comes
// first, as in Enterprise Gateway; gateway provisioners have the same under
// another name. A kernel that runs without images names none.
func kernelImages(raw json.RawMessage) ([]string, error) {
	spec, err := object(raw, "spec")
	if err != nil {
		return nil, err
	}
	metadata, err := object(spec, "metadata")
	if err != nil {
		return nil, err
	}
	var broken error
	for _, stanza := range []string{"process_proxy", "kernel_provisioner"} {
		images, err := stanzaImages(metadata, stanza)
		broken = errors.Join(broken, err)
		if len(images) > 0 {
			return images, oneLine(broken)
		}
	}
	return nil, oneLine(broken)
}

// stanzaImages returns the images that a stanza of the metadata names, and an
// error for what in it is no image's name.
func stanzaImages(metadata json.RawMessage, stanza string) ([]string, error) {
	proxy, err := object(metadata, stanza)
	if err != nil {
		return nil, err
	}
	config, err := object(proxy, "config")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", stanza, err)
	}
	var fields struct {
		Kernel   json.RawMessage `json:"image_name"`
		Executor json.RawMessage `json:"executor_image_name"`
	}
	if !isNull(config) {
		json.Unmarshal(config, &fields) // it is an object, and raw fields take any value
	}
	kernel, err := imageName(fields.Kernel)
	if err != nil {
		err = fmt.Errorf("%s: image_name %w", stanza, err)
	}
	executor, err2 := imageName(fields.Executor)
	if err2 != nil {
		err2 = fmt.Errorf("%s: executor_image_name %w", stanza, err2)
	}
	images := slices.DeleteFunc([]string{kernel, executor}, func(s string) bool { return s == "" })
	return images, errors.Join(err, err2)
}

// imageName reads a value that should be an image's name. It is empty for a
// value that is missing, null or blank.
func imageName(value json.RawMessage) (string, error) {
	if isNull(value) {
		return "", nil
	}
	var name string
	if json.Unmarshal(value, &name) != nil {
		return "", errors.New("is not a string")
	}
	name = strings.TrimSpace(name)
	if len(name) > maxImageName {
		return "", fmt.Errorf("has %d bytes", len(name))
	}
	if strings.ContainsFunc(name, unicode.IsControl) {
		return "", fmt.Errorf("%q has control characters", shorten(name))
	}
	return name, nil
}

// object returns a field that should be an object. A field that is missing or
// null is an empty one.
func object(parent json.RawMessage, key string) (json.RawMessage, error) {
	value, err := field(parent, key)
	if err != nil {
		return nil, err
	}
	if !isNull(value) && value[0] != '{' {
		return nil, fmt.Errorf("%s is not an object", key)
	}
	return value, nil
}

// field returns a field of an object, nil where there is none.
func field(parent json.RawMessage, key string) (json.RawMessage, error) {
	if isNull(parent) {
		return nil, nil
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(parent, &fields) != nil {
		return nil, errors.New("it is not an object")
	}
	return fields[key], nil
}

func isNull(raw json.RawMessage) bool { return len(raw) == 0 || string(raw) == "null" }

// oneLine joins the lines of joined errors.
func oneLine(err error) error {
	if err == nil {
		return nil
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}

func shorten(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "..."
	}
	return s
}
